# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes an HTML page that compares several runs.

Every loss curve is drawn over steps, tokens, FLOPs and time, behind a switch, and a table has the
loss of each run at equal cost. A run without known FLOPs or time is left out of that chart only.
`experiments/report.py` reads the files. The page of one run is in `report.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.disk import replace_file
from jaxmoe.tracking import html_page
from jaxmoe.tracking.charts import Line, line_chart, plain_number
from jaxmoe.tracking.console import format_bytes, format_count, format_duration, format_flops
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.load_map import load_picture, load_style
from jaxmoe.tracking.report import MFU_DEFINITION, held_out
from jaxmoe.tracking.smoothing import smooth
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
    notes: Sequence[str] = (),
) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        title: Its heading.
        runs: In the order of the page.
        differing: The config fields that differ: the value in each run, by dotted path.
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
    sections.append(html_page.section(f"Loss, {unit}", _switch(runs)))
    heading = "At the end, and at equal cost"
    sections.append(html_page.section(heading, html_page.table(["", *names], final_numbers(runs))))
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
    sections.append(f'<p class="soft small">{html_page.escape(MFU_DEFINITION)}</p>\n')
    style = load_style(8) + STYLE
    replace_file(path, html_page.page(title, sections, style=style))


def bits_unit(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return the unit in which all runs can be compared, and its metric."""
    if all(run.bytes_per_token is not None for run in runs):
        return "bits per byte", BITS_PER_BYTE
    return "bits per token", BITS_PER_TOKEN


def training_bits(run: ComparedRun, unit: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and smoothed training loss."""
    steps, nats = run.series[LOSS]
    per = (run.bytes_per_token or 1.0) if unit == "bits per byte" else 1.0
    return steps, smooth(nats / math.log(2.0) / per)


def final_numbers(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    """Return the rows of the table: a label, and a cell per run."""

    def row(label: str, cell: Callable[[ComparedRun], Any]) -> tuple[str, ...]:
        return (label, *(html_page.spell(cell(run)) for run in runs))

    def find_known(name: str, spell: Callable[[Any], Any]) -> Callable[[ComparedRun], Any]:
        def cell(run: ComparedRun) -> Any:
            value = run.summary.get(name)
            return None if value is None else spell(value)

        return cell

    rows = [
        row("status", find_known("status", str)),
        row("steps", find_known("steps", int)),
        row("tokens", find_known("tokens", format_count)),
        row("held-out loss", lambda run: _held_out_text(run.summary)),
        row("training loss, nats/token", find_known("final_loss", "{:.4f}".format)),
    ]
    unit, _ = bits_unit(runs)
    for axis in AXES[1:]:
        budget, losses = at_equal_cost(runs, axis.name)
        if budget is not None:
            label = f"training loss, {unit}, at {axis.spell(budget)}"
            label += {"tokens": " tokens", "time": " of training"}.get(axis.name, "")
            rows.append((label, *("-" if x is None else f"{x:.4f}" for x in losses)))
    rows += [
        row("tokens per second", find_known("tokens_per_second", format_count)),
        row("MFU", find_known("mfu", "{:.1%}".format)),
        row("parameters", find_known("parameters_total", format_count)),
        row("active parameters", find_known("parameters_active", format_count)),
        row("model FLOPs per token", find_known("model_flops_per_token", format_flops)),
        row("training time", find_known("trained_seconds", format_duration)),
        row("compiling", find_known("compile_seconds", "{:.1f} s".format)),
        row("peak memory", find_known("peak_memory_bytes", format_bytes)),
        row("max violation", find_known("router_max_violation", "{:.2f}".format)),
        row("dropped", find_known("router_dropped_fraction", "{:.1%}".format)),
        row("mesh", find_known("mesh", dict)),
    ]
    return [cells for cells in rows if set(cells[1:]) != {"-"}]


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
        _, bits = training_bits(run, unit)
        finite = np.isfinite(bits)
        has_any = bool(finite.any())
        losses.append(float(np.interp(budget, x[finite], bits[finite])) if has_any else None)
    return budget, losses


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
        steps, bits = training_bits(run, unit)
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


def _held_out_text(summary: Mapping[str, Any]) -> str | None:
    bits, unit = held_out(summary)
    return None if bits is None else f"{bits:.4f} {unit}"
