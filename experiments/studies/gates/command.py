# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares SqrtGate with softmax gates: does the MoE branch keep its size for every top_k?

    jaxmoe gates [short | full] [--top_ks 1 4 16 ...] [--axes top_k granularity]

At every top_k and for both gates: the RMS of the MoE branch's output at initialisation as a mean
over seeds with its interval, and the correlation of the experts' outputs; after training, the drift
of both, the held-out loss and the router Z. One table, one picture, a verdict on every claim. Every
finished point is a line of trials.jsonl: the same command continues after the last one. Exit codes:
0 done, 2 bad configuration, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.cli.output import say
from experiments.studies.gates.config import FREE_FIELDS, RECIPES, GatesConfig, Point, points_of
from experiments.studies.gates.picture import draw_gates
from experiments.studies.gates.table import LEGEND, TABLES, TITLES, rows_of, verdicts
from experiments.studies.gates.trial import GatePrograms, load_task, point_json, run_trial
from experiments.studies.study import StudyStoppedError, run_study
from experiments.studies.trials import Record, TrialsFile
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "gates.png"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return run_study("gates", RECIPES, argv, __doc__ or "", GatesStudy, free=FREE_FIELDS)


class GatesStudy:
    """The points of one directory, those of earlier starts included.

    Raises:
        ValueError: A point has no model, or the trials in the directory were of other data.
    """

    def __init__(self, config: GatesConfig, directory: RunDirectory):
        self._config = config
        self._directory = directory
        self._task = load_task(config)
        for point in points_of(config):
            GatePrograms(config, point, self._task)  # checks every size; compiles nothing
        self._file = TrialsFile(directory.trials_file)
        self._records = {_point_of(r): r for r in self._file.read(self._task.digest)}

    def run(self, stop: StopRequest) -> str:
        """Measure every missing point; return the status."""
        for point in points_of(self._config):
            if self._is_current(point):
                continue
            try:
                record = run_trial(self._config, point, self._task, stop)
            except StudyStoppedError:
                break
            record["data"] = self._task.digest
            self._file.append(record)
            self._records[point] = record
            say(_progress(self._config, point, record))
        return stop.reason or "done"

    def _is_current(self, point: Point) -> bool:
        """Return whether the record of a point has its present definition, and its training."""
        record = self._records.get(point)
        if record is None or record["moe"] != point_json(self._config, point):
            return False
        return record["trained"] is not None or point.top_k not in self._config.trained_top_ks

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return tables and verdicts as text."""
        config = self._config
        planned = points_of(self._config)
        records = {point: self._records[point] for point in planned if point in self._records}
        rows = rows_of(config, records)
        texts = []
        pages = []
        for axis, title in TITLES.items():
            mine = [row for row in rows if row["axis"] == axis]
            if mine:
                pages.append(f"### {title[0].upper()}{title[1:]}")
                for when, table in TABLES.items():
                    texts.append(f"{title}; {when}\n\n{table.as_text(mine)}")
                    pages.append(f"{when.capitalize()}:\n\n{table.as_markdown(mine)}")
        if rows:
            texts.append(LEGEND)
        verdict_rows = verdicts(rows)
        texts += [
            f"{v['axis']}: {v['claim']}: {v['verdict'].upper()} ({v['words']})"
            for v in verdict_rows
        ]
        picture = self._directory.plots_directory / PICTURE
        draw_gates(picture, rows)
        spent = sum(record["seconds"] for record in records.values())
        summary: dict[str, Any] = {
            "status": status,
            "points": len(records),
            "points_planned": len(planned),
            "initial_seeds": config.initial_seeds,
            "seeds": config.seeds,
            "steps": config.training.steps,
            "rows": rows,
            "verdicts": verdict_rows,
            "markdown": "\n\n".join(pages),
            "picture": str(picture),
            "wall_seconds": seconds,
            "trial_seconds": spent,
        }
        self._directory.write_summary(summary)
        texts.append(
            f"{picture}; {len(records)} of {len(planned)} points, {format_duration(spent)}"
        )
        return "\n\n".join(texts)


def _point_of(record: Record) -> Point:
    return Point(record["axis"], record["gate"], record["top_k"])


def _progress(config: GatesConfig, point: Point, record: Record) -> str:
    """Return the line that reports a finished point."""
    (row,) = rows_of(config, {point: record})
    trained = "" if row["bits"] is None else f", trained {row['rms_after']:.3f}"
    name = f"{point.axis:11} {point.gate:12} K={point.top_k:<3}"
    seconds = f"{record['seconds']:.0f} s, {record['compile_seconds']:.0f} of them compiling"
    return f"{name} RMS {row['rms']:.4f} +- {row['rms_half_width']:.4f}{trained} ({seconds})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
