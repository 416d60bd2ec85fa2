# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SqrtGate against softmax gates: does the MoE branch keep its size whatever top_k is?

    python -m experiments.gates [short | full] [--top_ks 1 4 16 ...] [--axes top_k granularity]

At every top_k and for both gates the RMS of the MoE branch's output at initialisation, as a mean
over seeds with its interval, and the correlation of the experts' outputs beside it; then, trained,
how far both have drifted, the held-out loss and the router Z. One table, one picture, a verdict on
every claim. Every finished point is a line of trials.jsonl: the same command continues after the
last one. Exit codes: 0 done, 2 bad configuration, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.studies.gates.config import (
    FREE_FIELDS,
    RECIPES,
    GatesConfig,
    Point,
    points_of,
)
from experiments.studies.gates.picture import draw_gates
from experiments.studies.gates.table import TITLES, as_markdown, as_text, rows_of, verdicts
from experiments.studies.gates.trial import (
    Programs,
    Task,
    load_task,
    point_json,
    run_trial,
)
from experiments.studies.trials import STOP_CODES, Record, StoppedError, TrialsFile
from jaxmoe.optional import require
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "gates.png"
Records = dict[Point, Record]


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.gates"
    recipe, config = cli.parse(RECIPES, "short", argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    directory = RunDirectory(config.run.directory or f"runs/gates/{config.run.name or recipe}")
    started = time.perf_counter()
    with StopRequest() as stop:
        with cli.exit_on_bad_configuration():
            require("matplotlib.figure")  # now, and not after ten minutes
            directory.acquire(on_lost=stop.taken_over)
        try:
            with cli.exit_on_bad_configuration():
                task = load_task(config)
                for point in points_of(config):
                    Programs(config, point, task)  # every size, optimiser and schedule, uncompiled
                directory.check_config(config, free=FREE_FIELDS)
                file = TrialsFile(directory.trials_file)
                records = {_point_of(record): record for record in file.read(task.digest)}
                directory.write_environment([str(device) for device in jax.devices()])
            status = _measure(config, task, file, records, stop)
            with cli.exit_on_bad_configuration():
                say(_write(config, directory, records, status, time.perf_counter() - started))
        finally:
            directory.release()
    return int(STOP_CODES.get(status, cli.ExitCode.DONE))


def _measure(
    config: GatesConfig, task: Task, file: TrialsFile, records: Records, stop: StopRequest
) -> str:
    """Every point that is missing; "done", or the reason of a stop."""
    for point in points_of(config):
        if _is_current(config, point, records.get(point)):
            continue
        try:
            record = run_trial(config, point, task, stop)
        except StoppedError:
            break
        record["data"] = task.digest
        file.append(record)
        records[point] = record
        say(_in_words(config, point, record))
    return stop.reason or "done"


def _point_of(record: Record) -> Point:
    return Point(record["axis"], record["gate"], record["top_k"])


def _is_current(config: GatesConfig, point: Point, record: Record | None) -> bool:
    """Whether a record is of the point as it is defined now, and trained if it should be."""
    if record is None or record["moe"] != point_json(config, point):
        return False
    return record["trained"] is not None or point.top_k not in config.trained_top_ks


def _write(
    config: GatesConfig,
    directory: RunDirectory,
    records: Records,
    status: str,
    seconds: float,
) -> str:
    """summary.json and the picture; the tables and verdicts in words."""
    found = {point: records.get(point) for point in points_of(config)}
    known = {point: record for point, record in found.items() if record is not None}
    rows, words, pages = rows_of(config, known), [], []
    for axis, title in TITLES.items():
        mine = [row for row in rows if row["axis"] == axis]
        if mine:
            words.append(f"{title}\n\n{as_text(mine)}")
            pages.append(f"### {title[0].upper()}{title[1:]}\n\n{as_markdown(mine)}")
    said = verdicts(rows)
    words += [f"{v['axis']}: {v['claim']}: {v['verdict'].upper()} ({v['words']})" for v in said]
    picture = directory.plots_directory / PICTURE
    draw_gates(picture, rows)
    spent = sum(record["seconds"] for record in known.values())
    summary: dict[str, Any] = {
        "status": status,
        "points": len(known),
        "points_planned": len(found),
        "initial_seeds": config.initial_seeds,
        "seeds": config.seeds,
        "steps": config.training.steps,
        "rows": rows,
        "verdicts": said,
        "markdown": "\n\n".join(pages),
        "picture": str(picture),
        "wall_seconds": seconds,
        "trial_seconds": spent,
    }
    directory.write_summary(summary)
    words.append(f"{picture}; {len(known)} of {len(found)} points, {format_duration(spent)}")
    return "\n\n".join(words)


def _in_words(config: GatesConfig, point: Point, record: Record) -> str:
    """A line when a point is done."""
    (row,) = rows_of(config, {point: record})
    trained = "" if row["bits"] is None else f", trained {row['rms_after']:.3f}"
    name = f"{point.axis:11} {point.gate:12} K={point.top_k:<3}"
    seconds = f"{record['seconds']:.0f} s, {record['compile_seconds']:.0f} of them compiling"
    return f"{name} RMS {row['rms']:.4f} +- {row['rms_half_width']:.4f}{trained} ({seconds})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
