# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Draws indicators of layers, and the congestion of routers for the report."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np

from jaxmoe.contrib.telemetry.recorders import (
    CONGESTION,
    INDICATORS,
    NAMES,
    over_layers,
    phases,
)
from jaxmoe.contrib.telemetry.stability import MOST_GROWTH, judge_sizes
from jaxmoe.optional import require
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporting.recorded import RecordedRun
from jaxmoe.tracking import html_page
from jaxmoe.tracking.charts import Line, line_chart, with_smoothed
from jaxmoe.tracking.console import format_count
from jaxmoe.tracking.history import read_history
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.plots import GRAY, figure_of_panels, save_figure
from jaxmoe.tracking.report import picture_section
from jaxmoe.tracking.smoothing import smooth

_SIZE_VERDICTS = {True: "does not grow", False: "GROWS", None: "not judged"}
"""Text for the verdict of an indicator over sizes."""


def indicators_of_run(directory: RunDirectory, metrics: Series) -> str:
    """Draw the indicators of a run, and return a section with the picture.

    Args:
        directory: Run directory.
        metrics: Unused.
    """
    del metrics
    steps, series = read_history(directory.path / INDICATORS)
    if not series:
        return ""
    path = directory.plots_directory / "indicators.png"
    plot_indicators(path, steps, series)
    return picture_section(path)


def indicators_by_size(runs: Mapping[str, RecordedRun]) -> str:
    """Return a section: does the plateau of an indicator grow with the size of the model?

    Args:
        runs: Runs with indicators by name, the smallest model first. Of runs of one size there is
            no section.
    """
    sizes = [run.summary["parameters_total"] for run in runs.values()]
    if len({*sizes}) < len(sizes):
        return ""
    series_of_run = {}
    for name, run in runs.items():
        _, series = read_history(run.directory.path / INDICATORS)
        label = f"{name} ({format_count(run.summary['parameters_total'])})"
        series_of_run[label] = {key: over_layers(key, values) for key, values in series.items()}
    rows = [
        (name.replace("_", " "), _SIZE_VERDICTS[verdict.holds], verdict.explanation)
        for name, verdict in judge_sizes(series_of_run).items()
    ]
    if not rows:
        return ""
    table = html_page.table(("indicator", "with the size", "median of the last tenth"), rows)
    note = (
        f'<p class="soft small">An indicator grows where its plateau is more than {MOST_GROWTH:g}'
        " times that of the next smaller model.</p>"
    )
    return html_page.section("Indicators by the size of the model", table + note)


def congestion_of_run(directory: RunDirectory, metrics: Series) -> str:
    """Return the section on the congestion of the routers of a run.

    Args:
        directory: Run directory.
        metrics: Logged metrics of the run.
    """
    steps, series = read_history(directory.path / CONGESTION)
    return congestion_section(metrics, steps, series) if len(steps) else ""


def plot_indicators(path: str | os.PathLike[str], steps: np.ndarray, series: Mapping) -> None:
    """Draw a panel for each indicator, a line for each layer: the first dark, the last light.

    Args:
        path: The PNG file.
        steps: [n], rising.
        series: By name, [n L].

    Raises:
        MissingPackageError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    colors = require("matplotlib").colormaps["viridis"]
    columns = 4
    rows = math.ceil(len(series) / columns)
    figure, panels = figure_of_panels(
        width=15.0, height=0.6 + 2.3 * rows, rows=rows, columns=columns
    )
    for axes in panels[len(series) :]:
        axes.set_visible(False)
    most = max(values.shape[1] for values in series.values())
    for axes, (name, values) in zip(panels, series.items(), strict=False):
        layers = values.shape[1]
        for layer in range(layers):
            color = GRAY if layers < most else colors(0.9 * layer / max(layers - 1, 1))
            axes.plot(steps, smooth(values[:, layer]), color=color, linewidth=1.2)
        axes.set_title(name.replace("_", " ").replace("/", ": "), fontsize=9, loc="left")
        axes.margins(x=0.01)
        axes.tick_params(labelsize=8)
    figure.suptitle(
        f"Indicators by step, smoothed; layers 0 (dark) to {most - 1} (light), gray: of no layer",
        fontsize=11,
    )
    save_figure(figure, path)


def congestion_section(
    series: Series, steps: np.ndarray, estimates: Mapping[str, np.ndarray]
) -> str:
    """Return gamma_eff over training with its interval and phases, and the coupling of weights."""
    labels = ("gamma_eff, mean over layers", "lower end of the interval", "upper end")
    lines = [
        Line(label=label, x=steps, y=estimates[name].mean(-1), color=color, kind=kind)
        for color, (label, name, kind) in enumerate(
            zip(labels, NAMES, ("dots", "line", "line"), strict=True)
        )
    ]
    charts = [line_chart(lines, y_label="gamma_eff", from_zero=True, size=(960, 260))]
    coupled = []
    for color, (label, name) in enumerate(
        (
            ("router row and its expert's gate neurons", "indicators/direction_coupling"),
            ("two router rows", "router/row_similarity"),
            ("router logit and norm of gate neurons", "indicators/activation_correlation"),
        )
    ):
        if name in series:
            coupled += with_smoothed(label, *series[name], color=color)
    if coupled:
        charts.append(line_chart(coupled, y_label="mean cosine, correlation", size=(960, 200)))

    def spell(estimate: tuple[float, float, float]) -> str:
        return "{:.3g} ({:.3g} to {:.3g})".format(*estimate)

    rows = [
        (str(layer), p.name, f"{p.first} to {p.last}", spell(p.start), spell(p.end))
        for layer in range(estimates[NAMES[0]].shape[1])
        for p in phases(steps, *(estimates[name][:, layer] for name in NAMES))
    ]
    table = html_page.table(("layer", "phase", "steps", "gamma_eff at first", "at last"), rows)
    note = (
        '<p class="soft small">gamma_eff: how strongly routers avoid loaded experts; 95 %'
        " intervals by bootstrap over the steps of an estimate. Surge ends at the largest,"
        " stabilization where the interval no longer reaches that of the largest.</p>"
    )
    return html_page.section("Congestion of the routers", *charts, table + note)
