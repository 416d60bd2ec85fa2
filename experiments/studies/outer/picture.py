# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of `outer`: a row per method, a panel per number, the best at the top.

Orange: the baseline and the worker without exchange. Blue: the methods.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from experiments.studies.columns import Row
from experiments.studies.outer.config import ALONE, BASELINE
from jaxmoe.tracking.plots import BLUE, GRAY, ORANGE, figure_of_panels, save_figure

_DASHES = (0, (4, 3))


def draw_comparison(path: str | os.PathLike[str], rows: Sequence[Row], *, floor: float) -> None:
    """Draw one PNG file.

    Args:
        path: Path of the file.
        rows: Rows of `rows_of`.
        floor: Exact entropy of the language in bits per token.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    drawn = [row for row in rows if row["excess"] is not None]
    places = list(range(len(drawn)))[::-1]
    figure, panels = figure_of_panels(
        width=13.0, height=1.7 + 0.3 * max(len(drawn), 2), columns=4, widths=(1.6, 1.6, 1.3, 1)
    )
    for axes in panels:
        axes.set_ylim(-0.7, max(len(drawn), 1) - 0.3)
        axes.set_yticks(places)
        axes.tick_params(labelleft=False, length=0)
    panels[0].set_yticks(places, [row["method"] for row in drawn])
    panels[0].tick_params(labelleft=True)
    _set_decades(panels[2], [row["bytes"] for row in drawn if row["bytes"]])
    for row, place in zip(drawn, places, strict=True):
        _draw_row(panels, row, place)
    panels[0].set_xlim(left=0.0)
    panels[0].set_xlabel(f"held-out bits per token above {floor:.4f}\n(dots: seeds)")
    panels[1].axvline(0.0, color=GRAY, linewidth=1.0, linestyle=_DASHES)
    panels[1].set_xlabel(f"bits per token above {BASELINE}\n(paired, 95% interval over seeds)")
    panels[2].set_xlabel("bytes that a worker sends\n(mean of a step)")
    panels[3].set_xlabel("spread of the messages\n(over the pseudo-gradient)")
    panels[3].set_xlim(left=0.0)
    save_figure(figure, path)


def _set_decades(axes: Any, values: Sequence[float]) -> None:
    """Give a panel a logarithmic axis over the whole decades of some values."""
    axes.set_xscale("log")
    if values:
        first = math.floor(math.log10(min(values)))
        axes.set_xlim(10.0**first, 10.0 ** max(math.ceil(math.log10(max(values))), first + 1))


def _draw_row(panels: Sequence, row: Row, place: int) -> None:
    """Draw the marks of one method."""
    color = ORANGE if row["method"] in (BASELINE, ALONE) else BLUE
    seeds = row["excess_by_seed"]
    panels[0].plot(seeds, [place] * len(seeds), color=color, marker=".", ls="", alpha=0.5)
    panels[0].plot(row["excess"], place, color=color, marker="|", ms=11, mew=2.0)
    if row["difference"] is not None:
        panels[1].errorbar(
            row["difference"],
            place,
            xerr=row["half_width"],
            color=color,
            marker="o",
            ms=4.5,
            capsize=2.5,
            linewidth=1.4,
        )
    for axes, value in zip(panels[2:], (row["bytes"] or None, row["spread"]), strict=True):
        if value is not None:
            axes.plot(value, place, color=color, marker="o", ms=4.5, clip_on=False)
