# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of `transfer`: one row per arm, loss by rate left, best rate right.

One colour per point, darker as it grows. The best rate is a dot with its interval, hollow at an
edge of the grid. A rate that diverged is a cross at the top.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.optional import require
from jaxmoe.tracking.plots import GRAY, ORANGE, figure_of_panels, save_figure

Row = Mapping[str, Any]

_MOST_TICKS = 10


def draw_transfer(
    path: str | os.PathLike[str],
    points: Sequence[Row],
    arms: Sequence[Row],
    *,
    axis: str,
    words: str,
    unit: str,
) -> None:
    """Draw one PNG file.

    Args:
        path: Path of the file.
        points: Rows of `point_row`.
        arms: Rows of `arm_row`.
        axis: Name of the axis.
        words: Meaning of its value.
        unit: Unit of the loss.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    names = list(dict.fromkeys(row["arm"] for row in points))
    rows = max(len(names), 1)
    figure, panels = figure_of_panels(
        width=11.0, height=0.6 + 3.4 * rows, rows=rows, columns=2, widths=(1.5, 1.0)
    )
    values = sorted({row["value"] for row in points})
    shades = require("matplotlib").colormaps["viridis"](np.linspace(0.85, 0.1, len(values)))
    colors = dict(zip(values, shades, strict=True))
    for index, name in enumerate(names):
        left, right = panels[2 * index : 2 * index + 2]
        mine = [row for row in points if row["arm"] == name]
        _draw_curves(left, mine, colors, axis)
        left.set_ylabel(f"held-out {unit}")
        left.set_title(name, loc="left", fontsize=10, fontweight="bold")
        arm = next((row for row in arms if row["arm"] == name), None)
        _draw_optima(right, mine, colors, arm)
        right.set_ylabel("best rate")
        is_last = index == len(names) - 1
        left.set_xlabel("learning rate" if is_last else "")
        legend = "hollow: at an edge of the grid; band: a factor of two"
        right.set_xlabel(f"{axis} ({words})\n{legend}" if is_last else "")
    save_figure(figure, path)


def _draw_curves(axes: Any, rows: Sequence[Row], colors: Mapping[float, Any], axis: str) -> None:
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    for row in rows:
        color = colors[row["value"]]
        losses = [np.nan if loss is None else loss for loss in row["losses"]]
        axes.plot(row["rates"], losses, color=color, marker="o", ms=3, linewidth=1.4)
        axes.plot([], [], color=color, label=f"{axis} {row['value']:g}")
        if row["best_rate"] is not None:
            axes.errorbar(row["best_rate"], row["loss"], **_mark(row, "xerr", color))
    bottom, top = axes.get_ylim()
    for row in rows:
        for rate in row["diverged_rates"]:
            axes.plot(rate, top, marker="x", color=colors[row["value"]], clip_on=False)
    finite_losses = [loss for row in rows for loss in row["losses"] if loss is not None]
    if finite_losses:  # a bad rate must not press the good ones together
        worst = max(min(x for x in row["losses"] if x is not None) for row in rows if _has(row))
        axes.set_ylim(bottom, min(top, worst + 1.5 * (worst - min(finite_losses)) + 0.3))
    _ticks_at(axes.set_xticks, {rate for row in rows for rate in row["rates"]})
    axes.legend(loc="best", frameon=False, fontsize=8)


def _ticks_at(place: Any, values: Iterable[float]) -> None:
    """Set ticks at the values themselves where they fit."""
    ticks = sorted(values)
    if len(ticks) <= _MOST_TICKS:
        place(ticks, [f"{value:.3g}" for value in ticks])


def _has(row: Row) -> bool:
    return any(loss is not None for loss in row["losses"])


def _draw_optima(axes: Any, rows: Sequence[Row], colors: Mapping[float, Any], arm: Any) -> None:
    optima = [row for row in rows if row["best_rate"] is not None]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(_plain)
    _ticks_at(axes.set_xticks, {row["value"] for row in rows})
    for row in optima:
        color = colors[row["value"]]
        axes.errorbar(row["value"], row["best_rate"], **_mark(row, "yerr", color))
    if not optima:
        return
    first = optima[0]["best_rate"]
    axes.axhspan(first / 2, first * 2, color=GRAY, alpha=0.12, linewidth=0)
    axes.axhline(first, color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)))
    rates = [rate for row in optima for rate in (row["best_rate"], *(row["interval"] or ()))]
    axes.set_ylim(min(*rates, first / 2) / 1.5, max(*rates, first * 2) * 1.5)
    inside = [row for row in optima if row["edge"] is None]
    if arm is None or arm["exponent"] is None or len(inside) < 2:
        return
    x = np.log2([row["value"] for row in inside])
    y = np.log2([row["best_rate"] for row in inside])
    line = y.mean() + arm["exponent"] * (x - x.mean())
    axes.plot(2**x, 2**line, color=ORANGE, linewidth=1.4)
    label = f"exponent {arm['exponent']:+.2f}"
    if arm["exponent_interval"] is not None:
        label += " (95% {:+.2f} to {:+.2f})".format(*arm["exponent_interval"])
    axes.set_title(f"{label}: {arm['verdict']}", loc="right", fontsize=9)


def _mark(row: Row, error: str, color: Any) -> dict[str, Any]:
    """Draw dot, interval and fill of a best rate."""
    mark = {"color": color, "marker": "o", "ms": 7, "capsize": 3, "linewidth": 1.6, "zorder": 3}
    mark["markerfacecolor"] = color if row["edge"] is None else "white"
    if row["interval"] is not None:
        low, high = row["interval"]
        rate = row["best_rate"]
        mark[error] = [[max(rate - low, 0.0)], [max(high - rate, 0.0)]]
    return mark


def _plain(value: float, place: Any) -> str:
    """Label ticks with numbers instead of powers of two."""
    del place
    return f"{value:.3g}"
