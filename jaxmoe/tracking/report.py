# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes `report.html`: a run on one self-contained page.

Charts and images are embedded, nothing is fetched; one script moves the slider of the load map.
What was learnt is said in words. Sections: cards, loss, learning rate and gradient norm, router,
time, pipeline, samples, lineage, command and machine, all numbers, config, terms.
`jaxmoe/run/reporting/report.py` reads the files.

To add a section: append it in `write_report` in `jaxmoe/tracking/report.py`.
"""

from __future__ import annotations

import base64
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmoe.disk import replace_file
from jaxmoe.tracking import html_page
from jaxmoe.tracking.charts import Line, line_chart, with_smoothed
from jaxmoe.tracking.console import format_bytes, format_count, format_duration, format_flops
from jaxmoe.tracking.jsonl import Series
from jaxmoe.tracking.load_map import load_map, load_strips, load_style
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DEAD_FRACTION,
    DROPPED_FRACTION,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOAD_BALANCE,
    LOAD_ENTROPY,
    LOSS,
    MAX_VIOLATION,
    ROUTER_ENTROPY,
)

TITLES = {
    "loss": "Loss",
    "router_load": "Router load",
    "optimizer": "Learning rate and gradient norm",
}
"""Headings of known images by file stem; others use their file name."""

MFU_DEFINITION = (
    "MFU: tokens/s times model FLOPs per token over the peak FLOP/s of all devices. Model FLOPs are"
    " forward and backward of what a token meets (top_k of the experts, attention); recomputation,"
    " padding and dropped rows do not count. Peaks are dense, without sparsity; a device whose peak"
    " is not known has no MFU."
)
UNITS_NOTE = (
    "The load-balancing loss is 1 for a uniform router here, in Megatron and in MegaBlocks"
    " (MegaBlocks averages over layers where we add); Hugging Face counts tokens instead of"
    " assignments, so that a uniform router has top_k. All before their coefficients."
)

TIME_ROWS = {
    "train": "training steps that count, from dispatch to their metrics",
    "lost": "training of steps that a later start or a rollback repeated",
    "data": "waiting for batches",
    "report": "progress lines and trackers",
    "evaluate": "held-out loss",
    "checkpoint": "the part of saves that training waits for",
    "hooks": "other work between steps",
    "start": "imports, reading data, building the model and its initial values",
    "restore": "reading a checkpoint",
    "compile": "compiling the training step",
    "resize": "moving the state to another mesh",
    "finish": "samples, plots and this report",
    "down": "from the end of a killed start to the next start",
    "preempted": "from SIGTERM to the next start",
    "ended": "between the end of the run and a later start; not counted",
}
"""Meaning of the rows of goodput, for the table."""
TERMS = {
    "bits/byte": "held-out cross-entropy per byte of text; lower is better, and tokenizers compare",
    "context counts": "loss of a predictor that counts which byte follows the last 1, 2 or 3 bytes"
    " in the training text; xz: of that compressor on the held-out text",
    "max violation": "load of the busiest expert over the fair share, minus 1: 0 is balanced, 1 is"
    " twice its share; of the worst layer",
    "load entropy": "entropy of the load over log E (E experts): 1 is balanced",
    "router entropy": "entropy of the router's probabilities over log E: 1 is undecided",
    "dropped": "assignments of tokens to experts that exceeded a capacity and were not computed",
    "MFU": MFU_DEFINITION.removeprefix("MFU: "),
    "goodput": "share of the time, over all starts, spent on training steps that count",
    "gradient norm": "norm of all gradients before clipping",
    "tokens per second": "training throughput without compiling, evaluating and saving",
}
"""Meaning of the words of the page."""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Mapping[str, Any],
    metrics: Series | None = None,
    load: tuple[np.ndarray, np.ndarray] | None = None,
    more_sections: Sequence[str] = (),
    plots: Sequence[str | os.PathLike[str]] = (),
    samples: str = "",
    config: Mapping[str, Any] | None = None,
    lineage: Sequence[tuple[str, str]] = (),
    environment: Mapping[str, Any] | None = None,
    pipeline: tuple[str, str] | None = None,
) -> None:
    """Write the page.

    Args:
        path: The HTML file.
        title: Its heading, such as the name of the run.
        summary: The numbers of `summary.json`.
        metrics: Steps and values by metric, of `metrics.jsonl`.
        load: Steps [n] and load [n L E], of `router.npz`.
        more_sections: Further sections, as HTML, after that of the router.
        plots: Further pictures, PNG files.
        samples: Generated text.
        config: The resolved config, as JSON.
        lineage: Time and text of each event: how the run was extended, or which run it began from.
        environment: Command, date, commit, versions and host, of `environment.json`.
        pipeline: Description and timetable of the pipeline, the timetable empty if it is too long.

    Raises:
        OSError: If the file cannot be written, or a picture read.
    """
    sections = [html_page.cards(headline(summary))]
    series = metrics or {}
    if LOSS in series:
        sections.append(_training(series, summary))
    style = ""
    if load is not None and load[1].size:
        style = load_style(load[1].shape[1])
        sections.append(_router(series, summary, *load))
    sections += more_sections
    if units := summary.get("load_balance_units"):
        sections.append(_units(units))
    if goodput := summary.get("goodput"):
        sections.append(_goodput(goodput))
    if pipeline is not None:
        sections.append(_pipeline(*pipeline))
    sections += map(picture_section, plots)
    if samples:
        text = f"<pre>{html_page.escape(samples)}</pre>"
        sections.append(html_page.section("Samples", text))
    if lineage:
        table = html_page.table(("time", "this run was"), lineage)
        sections.append(html_page.section("Lineage", table))
    if environment:
        sections.append(_environment(environment))
    numbers = html_page.fold_content("Every number of summary.json", html_page.fields(summary))
    sections.append(html_page.section("All numbers", numbers))
    if config is not None:
        text = f"<pre>{html_page.escape(json.dumps(config, indent=2))}</pre>"
        folded = html_page.fold_content("All fields", text)
        sections.append(html_page.section("Configuration", folded))
    sections.append(html_page.section("Terms", html_page.table(("term", "meaning"), TERMS.items())))
    description = _about(summary)
    page = html_page.page(
        title, sections, introduction=description, lead=learnt(summary), style=style
    )
    replace_file(path, page)


def _pipeline(description: str, timetable: str) -> str:
    """Return the section of the pipeline."""
    text = f"<p>{html_page.escape(description)}</p>"
    if not timetable:
        return html_page.section("Pipeline", text)
    note = (
        "A line for each stage, a column for each tick. F3b: forward pass of micro-batch 3 through"
        " the second chunk of layers; B: backward pass; a dot: idle."
    )
    drawn = f"<p>{note}</p><pre style='white-space: pre'>{html_page.escape(timetable)}</pre>"
    return html_page.section("Pipeline", text, drawn)


def held_out(summary: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the held-out loss of a summary, and the unit of all its losses."""
    if summary.get("eval_bits_per_byte") is not None:
        return summary["eval_bits_per_byte"], "bits/byte"
    loss = summary.get("eval_bits_per_token")
    is_by_byte = loss is None and summary.get("bytes_per_token") is not None
    return loss, "bits/byte" if is_by_byte else "bits/token"


def training_bits(summary: Mapping[str, Any], unit: str) -> float | None:
    """Return the last training loss of a summary in a unit of `held_out`; None if unknown."""
    nats = summary.get("final_loss")
    if nats is None:
        return None
    return nats / _nats_per_bit(summary, unit)


def learnt(summary: Mapping[str, Any]) -> str:
    """Return in words what a run has learnt: its loss beside simpler predictors, and its experts.

    Args:
        summary: Numbers of `summary.json`.
    """
    sentences = []
    bits, unit = held_out(summary)
    if bits is not None:
        part = unit.removeprefix("bits/")
        sentences.append(
            f"The model needs {bits:.2f} bits for a {part} of text that it has not read."
        )
        references = summary.get("references_bits") or {}
        worse = {label: value for label, value in references.items() if value > bits}
        better = {label: value for label, value in references.items() if value <= bits}
        if worse:
            best = min(worse, key=worse.__getitem__)
            sentences.append(f"That is better than {best} ({worse[best]:.2f}).")
        if better:
            nearest = max(better, key=better.__getitem__)
            sentences.append(f"It has not reached {nearest} ({better[nearest]:.2f}).")
        training = training_bits(summary, unit)
        if training is not None and bits > 1.3 * training > 0:
            sentences.append(
                f"It knows the text of its training far better ({training:.2f}): more text, or"
                " fewer steps, would help."
            )
    violation = summary.get("router_max_violation")
    if violation is not None:
        sentences.append(
            f"The busiest expert computes {1 + violation:.1f} times its fair share of the tokens."
        )
    if skipped := summary.get("skipped_steps"):
        sentences.append(f"Steps that were refused and changed nothing: {skipped}.")
    return " ".join(sentences)


def headline(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the cards: label, number and note; unknown numbers have no card."""
    cards = []
    bits, unit = held_out(summary)
    references = summary.get("references_bits") or {}
    beside = ", ".join(f"{label} {value:.3f}" for label, value in references.items())
    if bits is not None:
        cards.append((f"held-out loss, {unit}", f"{bits:.4f}", beside))
    elif summary.get("final_loss") is not None:
        training = training_bits(summary, unit)
        cards.append((f"training loss, {unit}", f"{training:.4f}", beside))
    if summary.get("tokens_per_second") is not None:
        mfu = summary.get("mfu")
        note = "MFU not known: no peak for this device" if mfu is None else f"MFU {mfu:.1%}"
        cards.append(("tokens per second", format_count(summary["tokens_per_second"]), note))
    if summary.get("parameters_total") is not None:
        active = summary.get("parameters_active") or summary["parameters_total"]
        note = f"{format_count(active)} active per token"
        cards.append(("parameters", format_count(summary["parameters_total"]), note))
    if summary.get("tokens") is not None:
        flops = summary.get("model_flops_per_token")
        note = f"{format_flops(flops * summary['tokens'])}" if flops else ""
        cards.append(("tokens", format_count(summary["tokens"]), note))
    if summary.get("wall_seconds") is not None:
        note = f"compiling {summary.get('compile_seconds') or 0.0:.1f} s"
        cards.append(("time of the last start", format_duration(summary["wall_seconds"]), note))
    if summary.get("peak_memory_bytes"):
        note = f"peak of the {summary.get('peak_memory_of', 'device')}"
        cards.append(("memory", format_bytes(summary["peak_memory_bytes"]), note))
    if summary.get("router_max_violation") is not None:
        note = f"dropped {summary.get('router_dropped_fraction') or 0.0:.1%} of the assignments"
        cards.append(("max violation", f"{summary['router_max_violation']:.2f}", note))
    return cards


def picture_section(path: str | os.PathLike[str]) -> str:
    """Return a section with a picture in it.

    Args:
        path: PNG file, whose name is the heading unless `TITLES` has another.
    """
    plot = pathlib.Path(path)
    image = base64.b64encode(plot.read_bytes()).decode()
    heading = TITLES.get(plot.stem, plot.stem.replace("_", " ").capitalize())
    picture = (
        f'<img class="plot" alt="{html_page.escape(heading)}" src="data:image/png;base64,{image}">'
    )
    return html_page.section(heading, picture)


def bits_of_training(series: Series, summary: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the training loss in the unit of the held-out loss."""
    steps, nats = series[LOSS]
    return steps, nats / _nats_per_bit(summary, held_out(summary)[1])


def _nats_per_bit(summary: Mapping[str, Any], unit: str) -> float:
    """Return the nats of a token that are a bit in a unit of `held_out`."""
    per = (summary.get("bytes_per_token") or 1.0) if unit == "bits/byte" else 1.0
    return math.log(2.0) * per


def _about(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary.get('status', 'unfinished')} at step {summary.get('steps', '?')}"]
    if summary.get("mesh"):
        parts.append(f"mesh {html_page.spell(summary['mesh'])}")
    if summary.get("implementations"):
        parts.append(", ".join(f"{k}: {v}" for k, v in summary["implementations"].items()))
    return "; ".join(parts)


def _environment(environment: Mapping[str, Any]) -> str:
    """Return command, date, commit, versions and host of the latest start."""
    packages = environment.get("packages") or {}
    versions = {"python": environment.get("python"), **packages}
    rows = (
        ("command", environment.get("command")),
        ("in directory", environment.get("working_directory")),
        ("started", environment.get("started")),
        ("commit", environment.get("commit") or "not from a git checkout"),
        ("host", environment.get("host")),
        ("platform", environment.get("platform")),
        ("processors", environment.get("processors")),
        ("devices", environment.get("devices")),
        ("versions", {name: version for name, version in versions.items() if version}),
        ("variables", environment.get("variables")),
    )
    entries = [(name, html_page.spell(value)) for name, value in rows if value]
    return html_page.section("Command and machine", html_page.table(("latest start", ""), entries))


def _training(series: Series, summary: Mapping[str, Any]) -> str:
    """Return loss, learning rate and gradient norm."""
    unit = held_out(summary)[1]
    lines = with_smoothed("training, smoothed", *bits_of_training(series, summary))
    name = BITS_PER_BYTE if unit == "bits/byte" else BITS_PER_TOKEN
    if name in series:
        steps, bits = series[name]
        lines.append(Line(label="held out", x=steps, y=bits, color=1, kind="dots"))
    wide, narrow = (
        line_chart(
            lines,
            y_label=unit,
            references=summary.get("references_bits"),
            is_loss=True,
            size=size,
        )
        for size in ((960, 340), (420, 300))
    )
    loss = html_page.by_width(wide, narrow)
    further_lines = []
    if LEARNING_RATE in series:
        steps, rates = series[LEARNING_RATE]
        rate = Line(label="", x=steps, y=rates)
        further_lines.append(line_chart([rate], y_label="learning rate", from_zero=True))
    if GRADIENT_NORM in series:
        norms = with_smoothed("", *series[GRADIENT_NORM])
        further_lines.append(
            line_chart(norms, y_label="gradient norm, before clipping", is_log=True)
        )
    return html_page.section(
        "Training", loss, html_page.pair(*further_lines) if further_lines else ""
    )


def _beside_loss(series: Series, summary: Mapping[str, Any]) -> str:
    """Return loss and max violation above each other, on the same steps."""
    if LOSS not in series or MAX_VIOLATION not in series:
        return ""
    loss = with_smoothed("", *bits_of_training(series, summary))
    violation = with_smoothed("", *series[MAX_VIOLATION])
    label = f"training loss, {held_out(summary)[1]}"
    wide, narrow = (
        line_chart(loss, y_label=label, is_loss=True, size=(width, 200))
        + line_chart(
            violation, y_label="max violation, worst layer", from_zero=True, size=(width, 200)
        )
        for width in (960, 420)
    )
    return html_page.by_width(wide, narrow)


def _router(series: Series, summary: Mapping[str, Any], steps: np.ndarray, load: np.ndarray) -> str:
    """Return the load map, the strips, and the router's scalars."""
    lines = []
    for color, (label, name) in enumerate(
        (("router entropy / log E", ROUTER_ENTROPY), ("load entropy / log E", LOAD_ENTROPY))
    ):
        if name in series:
            lines += with_smoothed(label, *series[name], color=color)
    charts = [line_chart(lines, y_label="entropy, 1 = uniform")] if lines else []
    if LOAD_BALANCE in series:
        balance = with_smoothed("", *series[LOAD_BALANCE])
        label = "load-balancing loss, 1 = uniform"
        charts.append(line_chart(balance, y_label=label, references={"uniform": 1.0}))
    lost = []
    for color, (label, name) in enumerate(
        (("experts without a token", DEAD_FRACTION), ("dropped assignments", DROPPED_FRACTION))
    ):
        if name in series:
            lost.append(Line(label=label, x=series[name][0], y=series[name][1], color=color))
    if lost:
        charts.append(line_chart(lost, y_label="fraction", from_zero=True))
    _, layers, experts = load.shape
    note = (
        f'<p class="soft small">{layers} layers by {experts} experts: assignments of each expert'
        " over its fair share, before drops. One batch at a time above; below, means over the"
        " run, experts from top to bottom, steps from left to right.</p>"
    )
    return html_page.section(
        "Router",
        load_map(steps, load) + note,
        load_strips(steps, load),
        _beside_loss(series, summary),
        html_page.pair(*charts) if charts else "",
    )


def _units(units: Mapping[str, float]) -> str:
    rows = [(name, f"{value:.4f}") for name, value in units.items()]
    text = f'<p class="soft small">{html_page.escape(UNITS_NOTE)}</p>'
    table = html_page.table(("convention", "balance loss at the end, mean over layers"), rows)
    return html_page.section("Load balance in other units", table + text)


def _goodput(goodput: Mapping[str, Any]) -> str:
    wall = max(goodput["wall_seconds"], 1e-9)
    rows = [
        (row, format_duration(seconds), f"{seconds / wall:.1%}", TIME_ROWS.get(row, ""))
        for row, seconds in goodput["seconds"].items()
    ]
    rows.append(("all", format_duration(wall), "100.0%", ""))
    table = html_page.table(("where the time went", "time", "share", "meaning"), rows)
    starts = goodput["starts"]
    lost = goodput["lost_steps"]
    text = (
        f"goodput {goodput['share']:.1%} (share of the training steps that count);"
        f" {starts} start{'s' * (starts != 1)}; {lost} step{'s' * (lost != 1)} repeated"
    )
    note = f'<p class="soft small">{html_page.escape(text)}</p>'
    return html_page.section("Time of all starts", table + note)
