# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of `routers`: a row per method, a panel per number, the best at the top.

Blue: autoregressive. Orange, below a line: masked diffusion, with differences to the baseline
trained by masked diffusion.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from experiments.studies.columns import Row
from experiments.studies.routers.config import ObjectiveName
from jaxmoe.tracking.plots import BLUE, GRAY, ORANGE, figure_of_panels, save_figure

_COLORS: dict[ObjectiveName, str] = {"autoregressive": BLUE, "masked_diffusion": ORANGE}


def draw_comparison(
    path: str | os.PathLike[str], tables: Mapping[ObjectiveName, Sequence[Row]], *, baseline: str
) -> None:
    """Draw one PNG file.

    Args:
        path: Path of the file.
        tables: Rows of `rows_of` by objective.
        baseline: Method whose difference is 0.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    drawn = [
        (row, _COLORS[objective])
        for objective, rows in tables.items()
        for row in rows
        if row["bits"] is not None
    ]
    places = list(range(len(drawn)))[::-1]
    figure, panels = figure_of_panels(
        width=13.0, height=1.7 + 0.27 * max(len(drawn), 2), columns=5, widths=(2.2, 1.3, 1, 1.6, 1)
    )
    for axes in panels:
        axes.set_ylim(-0.7, max(len(drawn), 1) - 0.3)
        axes.tick_params(labelleft=False, length=0)
        changes = [i for i in range(1, len(drawn)) if drawn[i][1] != drawn[i - 1][1]]
        for index in changes:
            axes.axhline(places[index] + 0.5, color=GRAY, linewidth=0.8)
    panels[0].set_yticks(places, [row["method"] for row, _ in drawn])
    panels[0].tick_params(labelleft=True)
    for axes in panels[1:]:
        axes.set_yticks(places)
        axes.locator_params(axis="x", nbins=4)
    for (row, color), place in zip(drawn, places, strict=True):
        _draw_row(panels, row, color, place)
    for objective, color in _COLORS.items():
        if any(mark == color for _, mark in drawn):
            label = objective.replace("_", " ")
            panels[0].plot([], [], color=color, marker="o", ms=4.5, label=label)
    if drawn:
        panels[0].legend(loc="best", frameon=False, fontsize=8)
    panels[0].axvline(0.0, color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)))
    panels[0].set_xlabel(f"bits per byte above {baseline}\n(paired, 95% interval over seeds)")
    panels[1].set_xlabel("excess bits per token\n(languages)")
    panels[2].set_xlabel("language-expert MI\n(1: each determines the other)")
    panels[2].set_xlim(0.0, 1.0)
    panels[2].set_xticks([0.0, 0.5, 1.0])
    panels[3].set_xlabel("max violation over training\n(mean; line to the largest)")
    panels[3].set_xlim(left=0.0)
    panels[4].set_xlabel("time of a step\n(baseline: 1)")
    panels[4].set_xlim(left=0.0)
    panels[4].axvline(1.0, color=GRAY, linewidth=1.0, linestyle=(0, (4, 3)))
    save_figure(figure, path)


def _draw_row(panels: Sequence, row: Row, color: str, place: int) -> None:
    """Draw the marks of one method."""
    if row["difference"] is not None:
        panels[0].errorbar(
            row["difference"],
            place,
            xerr=row["half_width"],
            color=color,
            marker="o",
            ms=4.5,
            capsize=2.5,
            linewidth=1.4,
        )
    violation = row["max_violation"]
    if violation["mean"] is not None:
        ends = [violation["mean"], violation["sup"]]
        panels[3].plot(ends, [place, place], color=color, alpha=0.35, linewidth=3.0)
    values = (row["excess_bits"], row["mutual_information"], violation["mean"], row["step_ratio"])
    for axes, value in zip(panels[1:], values, strict=True):
        if value is not None:
            axes.plot(value, place, color=color, marker="o", ms=4.5, clip_on=False)
