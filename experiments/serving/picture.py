# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws what the commands of `serving` compare, and writes the page with the table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.disk import replace_file
from jaxmoe.tracking import html_page
from jaxmoe.tracking.charts import Line, line_chart
from jaxmoe.tracking.plots import figure_of_panels, save_figure


def draw_goodput(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Draw one PNG file.

    Args:
        path: Path of the file.
        rows: Rows of `simulate`.
    """
    figure, (axes,) = figure_of_panels(width=8.0, height=4.5)
    rates = sorted({row["rate"] for row in rows})
    axes.plot(rates, rates, color="#9ca3af", linestyle=(0, (4, 3)), label="all requests")
    for name, x, y in _lines(rows):
        axes.plot(x, y, marker="o", ms=4.0, label=name)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("requests per second within the SLO")
    axes.set_ylim(bottom=0.0)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def draw_caches(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> None:
    """Draw the hits of each policy over the capacity into one PNG file.

    Args:
        path: Path of the file.
        rows: Rows of `caches`.
    """
    figure, (axes,) = figure_of_panels(width=8.0, height=4.5)
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((r["capacity"], r["hit_rate"]) for r in rows if r["policy"] == name)
        style = {"color": "#9ca3af", "linestyle": (0, (4, 3))} if name == "belady" else {}
        axes.plot(*zip(*points, strict=True), marker="o", ms=4.0, label=name, **style)
    axes.set_xlabel("share of all experts that the device holds")
    axes.set_ylabel("share of uses that found their expert")
    axes.set_ylim(0.0, 1.0)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def write_report(
    path: str | os.PathLike[str],
    description: str,
    table: Sequence[Sequence[str]],
    rows: Sequence[dict[str, Any]],
) -> None:
    """Write the page.

    Args:
        path: Path of the HTML file.
        description: Line on model, device and workload.
        table: Headings, then the cells of every row.
        rows: Rows of `simulate`.
    """
    lines = [
        Line(label=name, x=np.asarray(x), y=np.asarray(y), color=color)
        for color, (name, x, y) in enumerate(_lines(rows))
    ]
    chart = line_chart(
        lines,
        y_label="requests per second within the SLO",
        x_label="requests per second",
        from_zero=True,
        size=(960, 380),
    )
    sections = [
        html_page.section("Goodput", chart),
        html_page.section("Policies", html_page.table(table[0], table[1:])),
    ]
    replace_file(path, html_page.page("Serving, simulated", sections, introduction=description))


def _lines(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[float], list[float]]]:
    """Return name, rates and goodput of each policy."""
    rows_by_policy = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((row for row in rows if row["policy"] == name), key=lambda row: row["rate"])
        rows_by_policy.append(
            (name, [row["rate"] for row in points], [row["goodput"] for row in points])
        )
    return rows_by_policy
