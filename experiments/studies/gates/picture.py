# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of `gates`: a row of panels for each axis, both gates over K.

Full lines: at initialisation, with the 95% interval; dashed lines and hollow marks: trained.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from experiments.studies.columns import Row
from experiments.studies.gates.config import COMPARED, Gate
from experiments.studies.gates.table import TITLES
from jaxmoe.tracking.plots import BLUE, GRAY, ORANGE, figure_of_panels, save_figure

_COLORS: dict[Gate, str] = {"sqrt": BLUE, "renormalized": ORANGE}
_LABELS: dict[Gate, str] = {"sqrt": "SqrtGate", "renormalized": "softmax over the chosen"}
_PANELS = (
    ("RMS of the MoE branch", "rms", "rms_after"),
    ("correlation of experts", "correlation", "correlation_after"),
    ("held-out bits per token", None, "bits"),
    ("router Z, its peak", None, "router_z_peak"),
)


def draw_gates(path: str | os.PathLike[str], rows: Sequence[Row]) -> None:
    """Draw one PNG file.

    Args:
        path: Path of the file.
        rows: Rows of `rows_of`.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    axes_names = list(dict.fromkeys(row["axis"] for row in rows)) or ["top_k"]
    figure, panels = figure_of_panels(
        width=13.0, height=0.5 + 2.9 * len(axes_names), rows=len(axes_names), columns=len(_PANELS)
    )
    for index, name in enumerate(axes_names):
        mine = [row for row in rows if row["axis"] == name]
        beside = panels[index * len(_PANELS) : (index + 1) * len(_PANELS)]
        for axes, (label, first, after) in zip(beside, _PANELS, strict=True):
            for gate in COMPARED:
                _draw(axes, [r for r in mine if r["gate"] == gate or r["top_k"] == 1], gate, first)
                _draw(axes, [r for r in mine if r["gate"] == gate or r["top_k"] == 1], gate, after)
            axes.set_xscale("log", base=2)
            places = sorted({row["top_k"] for row in mine})
            axes.set_xticks(places, [str(place) for place in places])
            axes.set_xlabel("K")
            axes.set_ylabel(label, fontsize=9)
        if any(row["rms"] for row in mine):
            beside[0].set_yscale("log")
        beside[1].axhline(0.0, color=GRAY, linewidth=0.8)
        beside[0].set_title(TITLES[name], fontsize=9, loc="left")
    for gate in COMPARED:
        panels[0].plot([], [], color=_COLORS[gate], marker="o", ms=4, label=_LABELS[gate])
    trained = {"linestyle": (0, (4, 2)), "marker": "o", "ms": 4, "markerfacecolor": "white"}
    panels[0].plot([], [], color=GRAY, label="trained", **trained)
    panels[0].legend(loc="best", frameon=False, fontsize=8)
    save_figure(figure, path)


def _draw(axes: Any, rows: Sequence[Row], gate: Gate, key: str | None) -> None:
    """Draw one curve; nothing when no row has a value."""
    measured = [row for row in rows if key is not None and row[key] is not None]
    if not measured or key is None:
        return
    places = [row["top_k"] for row in measured]
    values = [row[key] for row in measured]
    is_initial = key in ("rms", "correlation")
    axes.plot(
        places,
        values,
        color=_COLORS[gate],
        marker="o",
        ms=4,
        linewidth=1.6,
        linestyle="-" if is_initial else (0, (4, 2)),
        markerfacecolor=None if is_initial else "white",
    )
    if is_initial:
        halves = [row[f"{key}_half_width"] or 0.0 for row in measured]
        axes.errorbar(places, values, yerr=halves, color=_COLORS[gate], fmt="none", capsize=2)
