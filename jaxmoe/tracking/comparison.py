# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes an HTML page that compares several runs.

Every loss curve is drawn over steps, tokens, FLOPs and time, behind a switch: curves can be hidden,
and a part of them enlarged. A table, sorted by any column, has the loss of each run at equal cost.
A run without known FLOPs or time is left out of that chart only. The page holds the chart library
(`uplot/`) and fetches nothing; a browser without scripts shows the same curves as pictures.
`experiments/report.py` reads the files. The page of one run is in `report.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.disk import replace_file
from jaxmoe.tracking import html_page
from jaxmoe.tracking.charts import Line, line_chart, plain_number
from jaxmoe.tracking.console import format_bytes, format_count, format_duration, format_flops
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.load_map import load_picture, load_style
from jaxmoe.tracking.report import MFU_DEFINITION, held_out, training_bits
from jaxmoe.tracking.smoothing import smooth, thin_curve
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    LOSS,
    TRAINED_SECONDS,
    TRAINED_TOKENS,
)

STYLE = """
.switch > input { position: absolute; opacity: 0; }
.switch > label { display: inline-block; padding: 0.15rem 0.9rem; margin: 0 0.3rem 0.8rem 0;
  border: 1px solid var(--line); border-radius: 1rem; cursor: pointer; font-size: 0.88rem; }
.switch > input:checked + label { border-color: var(--accent); color: var(--accent); }
.switch > input:focus-visible + label { outline: 2px solid var(--accent); }
.switch > .view { display: none; }
#axes button { font: inherit; font-size: 0.88rem; padding: 0.15rem 0.9rem; cursor: pointer;
  margin: 0 0.3rem 0.8rem 0; border: 1px solid var(--line); border-radius: 1rem;
  background: none; color: inherit; }
#axes button[aria-pressed=true] { border-color: var(--accent); color: var(--accent); }
.uplot .u-legend { text-align: left; font-size: 0.85rem; } .uplot .u-legend .held { display: none; }
.sortable th, .sortable td { white-space: nowrap; }
.sortable th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  cursor: pointer; text-align: left; }
.sortable th[aria-sort=ascending] button::after { content: " \\2191"; }
.sortable th[aria-sort=descending] button::after { content: " \\2193"; }
""" + "\n".join(f"#by{n}:checked ~ .view{n} {{ display: block; }}" for n in range(4))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """Metrics and summary of one run."""

    name: str
    summary: Mapping[str, Any]
    """Summary of the run; for an unfinished one, what is known so far."""
    series: Series
    load: np.ndarray | None
    """[L E] shares of the assignments at the last step."""
    flops_per_token: float | None
    bytes_per_token: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StepAxis:
    name: str
    label: str
    spell: Callable[[float], str]
    position: Callable[[ComparedRun, np.ndarray], np.ndarray | None]


def position_by_step(run: ComparedRun, steps: np.ndarray) -> np.ndarray:
    """Return optimiser steps."""
    return np.asarray(steps, float)


def position_by_tokens(run: ComparedRun, steps: np.ndarray) -> np.ndarray | None:
    """Return the tokens trained on after some steps."""
    return _record(run, TRAINED_TOKENS, steps)


def position_by_flops(run: ComparedRun, steps: np.ndarray) -> np.ndarray | None:
    """Return the model FLOPs after some steps."""
    tokens = position_by_tokens(run, steps)
    if tokens is None or run.flops_per_token is None:
        return None
    return tokens * run.flops_per_token


def position_by_time(run: ComparedRun, steps: np.ndarray) -> np.ndarray | None:
    """Return the seconds of training after some steps."""
    return _record(run, TRAINED_SECONDS, steps)


AXES = (
    _StepAxis(name="step", label="step", spell=plain_number, position=position_by_step),
    _StepAxis(name="tokens", label="tokens", spell=format_count, position=position_by_tokens),
    _StepAxis(name="FLOPs", label="model FLOPs", spell=format_flops, position=position_by_flops),
    _StepAxis(
        name="time",
        label="training time (without compiling, evaluating and saving)",
        spell=format_duration,
        position=position_by_time,
    ),
)


def write_comparison(
    path: str | os.PathLike[str],
    *,
    title: str,
    runs: Sequence[ComparedRun],
    differing: Mapping[str, Sequence[str]],
    more_sections: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        title: Its heading.
        runs: In the order of the page.
        differing: The config fields that differ: the value in each run, by dotted path.
        more_sections: Further sections as HTML, behind the loads of the experts.
        notes: What the reader must know of the runs, such as one that is not finished.

    Raises:
        OSError: If the file cannot be written.
    """
    names = [run.name for run in runs]
    sections = []
    if notes:
        lines = "".join(f"<p>{html_page.escape(note)}</p>" for note in notes)
        sections.append(html_page.section("Notes", lines))
    unit, _ = bits_unit(runs)
    sections.append(html_page.section(f"Loss, {unit}", _curves(runs)))
    heading = "At the end, and at equal cost"
    sections.append(html_page.section(heading, _run_table(runs)))
    if differing:
        rows = [(path, *values) for path, values in differing.items()]
        content = html_page.table(["field", *names], rows)
    else:
        content = '<p class="soft">The configs are the same, but for the directory.</p>'
    sections.append(html_page.section("What differs in the config", content))
    pictures = [
        f"<div><h3>{html_page.escape(run.name)} <span class='soft small'>busiest"
        f" {run.load.max() * run.load.shape[-1]:.2f} of the fair share</span></h3>"
        f"{load_picture(run.load)}</div>"
        for run in runs
        if run.load is not None and run.load.size
    ]
    if pictures:
        scale = (
            '<div class="scale"><span>0</span><i></i>'
            "<span>2.5 of the fair share and more</span></div>"
        )
        loads = html_page.pair(*pictures) + scale
        sections.append(html_page.section("Load of the experts at the last step", loads))
    sections += more_sections
    sections.append(f'<p class="soft small">{html_page.escape(MFU_DEFINITION)}</p>\n')
    sections.append(_scripts(runs))
    style = load_style(8) + _file("uplot/uPlot.min.css") + STYLE
    replace_file(path, html_page.page(title, sections, style=style))


def bits_unit(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return the unit in which all runs can be compared, and its metric."""
    if all(run.bytes_per_token is not None for run in runs):
        return "bits per byte", BITS_PER_BYTE
    return "bits per token", BITS_PER_TOKEN


def training_curve(run: ComparedRun, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and smoothed training loss."""
    steps, nats = run.series[LOSS]
    per = (run.bytes_per_token or 1.0) if unit == "bits per byte" else 1.0
    return steps, smooth(nats / math.log(2.0) / per)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedNumber:
    """One number of every run."""

    label: str
    values: Sequence[Any]
    """By which runs are sorted; None where it is not known."""
    cells: Sequence[str]


def final_numbers(runs: Sequence[ComparedRun]) -> list[ComparedNumber]:
    """Return the numbers of the table that at least one run knows."""
    unit, _ = bits_unit(runs)

    def column(label: str, values: Sequence[Any], spell: Callable[[Any], Any]) -> ComparedNumber:
        cells = ["-" if value is None else html_page.spell(spell(value)) for value in values]
        return ComparedNumber(label=label, values=values, cells=cells)

    def summary_column(label: str, name: str, spell: Callable[[Any], Any]) -> ComparedNumber:
        return column(label, [run.summary.get(name) for run in runs], spell)

    held_out_losses = [held_out(run.summary) for run in runs]
    training = [
        training_bits(
            {**run.summary, "bytes_per_token": run.bytes_per_token}, unit.replace(" per ", "/")
        )
        for run in runs
    ]
    columns = [
        summary_column("status", "status", str),
        summary_column("steps", "steps", int),
        summary_column("tokens", "tokens", format_count),
        ComparedNumber(
            label="held-out loss",
            values=[bits for bits, _ in held_out_losses],
            cells=["-" if bits is None else f"{bits:.4f} {name}" for bits, name in held_out_losses],
        ),
        column(f"training loss, {unit}", training, "{:.4f}".format),
    ]
    for axis in AXES[1:]:
        budget, losses = at_equal_cost(runs, axis.name)
        if budget is not None:
            label = f"training loss, {unit}, at {axis.spell(budget)}"
            label += {"tokens": " tokens", "time": " of training"}.get(axis.name, "")
            columns.append(column(label, losses, "{:.4f}".format))
    columns += [
        summary_column("tokens per second", "tokens_per_second", format_count),
        summary_column("MFU", "mfu", "{:.1%}".format),
        summary_column("parameters", "parameters_total", format_count),
        summary_column("active parameters", "parameters_active", format_count),
        summary_column("model FLOPs per token", "model_flops_per_token", format_flops),
        summary_column("training time", "trained_seconds", format_duration),
        summary_column("compiling", "compile_seconds", "{:.1f} s".format),
        summary_column("peak memory", "peak_memory_bytes", format_bytes),
        summary_column("max violation", "router_max_violation", "{:.2f}".format),
        summary_column("dropped", "router_dropped_fraction", "{:.1%}".format),
        summary_column("mesh", "mesh", dict),
    ]
    return [column for column in columns if set(column.cells) != {"-"}]


def _run_table(runs: Sequence[ComparedRun]) -> str:
    """Return the table with a row per run; a click on a heading sorts it."""
    names = [run.name for run in runs]
    columns = [ComparedNumber(label="run", values=names, cells=names), *final_numbers(runs)]
    head = "".join(
        f'<th scope="col"><button type="button">{html_page.escape(column.label)}</button></th>'
        for column in columns
    )
    rows = []
    for place in range(len(runs)):
        cells = []
        for column in columns:
            value = column.values[place]
            key = "" if value is None else f' data-value="{html_page.escape(value)}"'
            cells.append(f"<td{key}>{html_page.escape(column.cells[place])}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def at_equal_cost(
    runs: Sequence[ComparedRun], axis_name: str
) -> tuple[float | None, list[float | None]]:
    """Return the smoothed training loss of each run at the total cost of the cheapest.

    Args:
        runs: To compare.
        axis_name: "tokens", "FLOPs" or "time".

    Returns:
        The common budget, None if fewer than two runs know theirs, and the losses.
    """
    axis = next(axis for axis in AXES if axis.name == axis_name)
    unit, _ = bits_unit(runs)
    spent = [axis.position(run, run.series[LOSS][0]) for run in runs]
    ends = [float(x[-1]) for x in spent if x is not None]
    if len(ends) < 2:
        return None, [None] * len(runs)
    budget = min(ends)
    losses: list[float | None] = []
    for run, x in zip(runs, spent, strict=True):
        if x is None:
            losses.append(None)
            continue
        _, bits = training_curve(run, unit)
        finite = np.isfinite(bits)
        has_any = bool(finite.any())
        losses.append(float(np.interp(budget, x[finite], bits[finite])) if has_any else None)
    return budget, losses


def _curves(runs: Sequence[ComparedRun]) -> str:
    """Return the place of the interactive chart, and pictures for browsers without scripts."""
    buttons = "".join(f'<button type="button">by {axis.name}</button>' for axis in AXES)
    help_text = (
        "Smoothed training loss; dots: held out. Drag over a part to enlarge it, double-click to"
        " see all again; click a name of the legend to hide its curve."
    )
    absent = [
        f"Not known by {axis.name}: {', '.join(names)}."
        for axis in AXES
        if (names := [r.name for r in runs if axis.position(r, r.series[LOSS][0]) is None])
    ]
    note = html_page.escape(" ".join([help_text, *absent]))
    return (
        f'<div id="axes">{buttons}</div><div id="chart"></div>'
        f'<p class="soft small">{note}</p><noscript>{_switch(runs)}</noscript>'
    )


def _scripts(runs: Sequence[ComparedRun]) -> str:
    """Return the curves as JSON, the chart library with its licence, and what draws with it."""
    unit, metric = bits_unit(runs)
    series = []
    for run in runs:
        steps, bits = thin_curve(*training_curve(run, unit))
        held_steps, held_bits = run.series.get(metric, (np.zeros(0), np.zeros(0)))
        series.append(
            {
                "name": run.name,
                "x": [_json_numbers(axis.position(run, steps)) for axis in AXES],
                "y": _json_numbers(bits),
                "held_x": [_json_numbers(axis.position(run, held_steps)) for axis in AXES],
                "held_y": _json_numbers(held_bits),
            }
        )
    axes = [{"name": axis.name, "label": axis.label} for axis in AXES]
    text = json.dumps({"unit": unit, "axes": axes, "runs": series}).replace("<", "\\u003c")
    library = _file("uplot/uPlot.iife.min.js").partition("\n")[2]  # its first line is an address
    licence = _file("uplot/LICENSE")
    return (
        f'<script id="series" type="application/json">{text}</script>\n'
        f"<script>/* uPlot 1.6.32\n\n{licence}*/\n{library}</script>\n"
        f"<script>{_file('comparison.js')}</script>\n"
    )


def _json_numbers(values: np.ndarray | None) -> list[float | None] | None:
    """Return numbers for JSON with six digits; those that are not finite are None."""
    if values is None:
        return None
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _file(name: str) -> str:
    """Return the text of a file of this folder."""
    return (pathlib.Path(__file__).parent / name).read_text(encoding="utf-8")


def _switch(runs: Sequence[ComparedRun]) -> str:
    """Return the four charts, of which one is shown, without a script."""
    buttons = []
    views = []
    for number, axis in enumerate(AXES):
        checked = " checked" if number == 0 else ""
        buttons.append(
            f'<input type="radio" name="by" id="by{number}"{checked}>'
            f'<label for="by{number}">by {axis.name}</label>'
        )
        views.append(f'<div class="view view{number}">{_chart(runs, axis)}</div>')
    return f'<div class="switch">{"".join(buttons)}{"".join(views)}</div>'


def _chart(runs: Sequence[ComparedRun], axis: _StepAxis) -> str:
    unit, metric = bits_unit(runs)
    lines = []
    absent = []
    for color, run in enumerate(runs):
        steps, bits = training_curve(run, unit)
        x = axis.position(run, steps)
        if x is None:
            absent.append(run.name)
            continue
        lines.append(Line(label=run.name, x=x, y=bits, color=color))
        if metric in run.series:
            steps, bits = run.series[metric]
            x = axis.position(run, steps)
            if x is not None:
                lines.append(Line(label="", x=x, y=bits, color=color, kind="dots"))
    chart = line_chart(lines, y_label=unit, x_label=axis.label, size=(960, 380), spell_x=axis.spell)
    note = "Smoothed training loss; with dots: held out."
    if absent:
        note += f" Not known by {axis.name}: {', '.join(absent)}."
    return f'{chart}<p class="soft small">{html_page.escape(note)}</p>'


def _record(run: ComparedRun, name: str, steps: np.ndarray) -> np.ndarray | None:
    """Return an increasing metric at given steps, by interpolation."""
    if name not in run.series:
        return None
    recorded_steps, values = run.series[name]
    return np.interp(steps, recorded_steps, values)
