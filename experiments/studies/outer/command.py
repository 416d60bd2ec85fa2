# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares methods of low-communication training: bits above the entropy, and bytes on the wire.

    jaxmoe outer [short | full] [--methods diloco streaming ...] [--workers 4]

Each method trains the same model on the same batches of a language of known entropy, with several
seeds, paired with those of synchronous training (none). Also: one worker on its share of the
batches without exchange (alone). One table, one picture. Every finished method is a line of
trials.jsonl: the same command continues after the last one. Exit codes: 0 done, 2 bad
configuration, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli.output import say
from experiments.studies.data import digest_of
from experiments.studies.outer.config import BASELINE, FREE_FIELDS, RECIPES, OuterConfig
from experiments.studies.outer.data import OuterTask, load_task, mesh_of, source_of
from experiments.studies.outer.picture import draw_comparison
from experiments.studies.outer.table import LEGEND, TABLE, rows_of
from experiments.studies.outer.trial import replicas_json, run_trial
from experiments.studies.study import StudyStoppedError, run_study
from experiments.studies.trials import TrialsFile
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "outer.png"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return run_study("outer", RECIPES, argv, __doc__ or "", OuterStudy, free=FREE_FIELDS)


class OuterStudy:
    """The trials of one directory, those of earlier starts included.

    Raises:
        ValueError: The schedule, the data or the devices do not fit, or the trials in the directory
            were of other data.
    """

    def __init__(self, config: OuterConfig, directory: RunDirectory):
        config.schedule.build(config.training.steps)  # an early error: else every method fails
        mesh_of(config)
        source = source_of(config)
        self._config = config
        self._directory = directory
        self._data = digest_of([source])
        self._floor = source.entropy_bits_per_token(config.training.sequence_length)
        self._file = TrialsFile(directory.trials_file)
        # The last record of a trial is the newest.
        self._records = {record["method"]: record for record in self._file.read(self._data)}

    @functools.cached_property
    def _task(self) -> OuterTask:
        return load_task(self._config)

    def run(self, stop: StopRequest) -> str:
        """Run every missing trial; return the status."""
        for name in self._config.chosen:
            if stop.reason is not None:
                break
            if self._is_current(name):
                continue
            try:
                record = run_trial(self._config, name, self._task, stop)
            except StudyStoppedError:
                break
            record["data"] = self._data
            self._file.append(record)
            self._records[name] = record
            say(_progress(record, self._floor))
        return stop.reason or "done"

    def _is_current(self, name: str) -> bool:
        """Return whether a method has a record of its present definition that needs no retry."""
        record = self._records.get(name)
        if record is None or record["status"] in ("refused", "failed"):
            return False
        return record["replicas"] == replicas_json(self._config, name)

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return the table as text."""
        config = self._config
        records = [self._records[name] for name in config.chosen if name in self._records]
        rows = rows_of(records, floor=self._floor)
        picture = self._directory.plots_directory / PICTURE
        draw_comparison(picture, rows, floor=self._floor)
        spent = sum(record["seconds"] for record in records)
        summary = {
            "status": status,
            "methods": list(config.chosen),
            "baseline": BASELINE,
            "seeds": config.seeds,
            "workers": config.workers,
            "every": config.every,
            "steps": config.training.steps,
            "tokens": config.training.tokens,
            "entropy_floor": self._floor,
            "rows": rows,
            "markdown": TABLE.as_markdown(rows),
            "picture": str(picture),
            "wall_seconds": seconds,
            "trial_seconds": spent,
        }
        self._directory.write_summary(summary)
        end = f"{picture}; {len(records)} methods took {format_duration(spent)}"
        return "\n\n".join([TABLE.as_text(rows), LEGEND, end])


def _progress(record: Mapping[str, Any], floor: float) -> str:
    """Return the line that reports a finished trial."""
    name = f"{record['method']:14}"
    if record["status"] != "done":
        return f"{name} {record['status']}: {record['reason']}"
    bits = " ".join(f"{value - floor:.4f}" for value in record["bits"])
    seconds = f"{record['seconds']:.0f} s, {record['compile_seconds']:.0f} of them compiling"
    return f"{name} {bits} bits above the floor by seed ({seconds})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
