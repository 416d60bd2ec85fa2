# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares routers: every method on the same data and budget, one table and one picture.

    jaxmoe routers [short | full] [--methods mixtral switch ...]

Each method is trained at the baseline's active FLOPs with several seeds, paired with those of the
baseline, on text (held-out bits per byte) and on disjoint languages (bits above their exact
entropy, and the mutual information of language and expert). Only causal methods are in the
autoregressive table; the others are compared by masked diffusion. Every finished method is a line
of trials.jsonl: the same command continues after the last one. Exit codes: 0 done, 2 bad
configuration, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli.output import say
from experiments.studies.routers.config import (
    FREE_FIELDS,
    RECIPES,
    ObjectiveName,
    RoutersConfig,
    model_of,
    objective_of,
)
from experiments.studies.routers.data import load_tasks
from experiments.studies.routers.picture import draw_comparison
from experiments.studies.routers.table import LEGEND, TABLE, TITLES, rows_of
from experiments.studies.routers.trial import RouterPrograms, RoutersTrial, moe_json, run_trial
from experiments.studies.study import StudyStoppedError, run_study
from experiments.studies.trials import Record, TrialsFile
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "routers.png"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return run_study("routers", RECIPES, argv, __doc__ or "", RoutersStudy, free=FREE_FIELDS)


class RoutersStudy:
    """The trials of one directory, those of earlier starts included.

    Raises:
        ValueError: The schedule or the data do not fit, or the trials in the directory were of
            other data.
    """

    def __init__(self, config: RoutersConfig, directory: RunDirectory):
        config.schedule.build(config.training.steps)  # an early error: else every method fails
        self._config = config
        self._directory = directory
        self._tasks, self._data = load_tasks(config)
        self._file = TrialsFile(directory.trials_file)
        # The last record of a trial is the newest.
        self._records = {(r["method"], r["objective"]): r for r in self._file.read(self._data)}
        self._baselines: dict[ObjectiveName, RouterPrograms] = {}

    def run(self, stop: StopRequest) -> str:
        """Run every missing trial; return the status."""
        for name in self._config.chosen:
            objective = objective_of(name)
            try:
                if objective == "masked_diffusion":
                    self._trial(self._config.baseline, objective, stop)
                record = self._trial(name, objective, stop)
                if record["status"] == "no ticket":
                    self._trial(self._config.baseline, "masked_diffusion", stop)
                    self._trial(name, "masked_diffusion", stop)
            except StudyStoppedError:
                break
            if stop.reason is not None:
                break
        return stop.reason or "done"

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return the tables as text."""
        config = self._config
        tables = {}
        sentences = []
        pages = []
        records = [r for r in self._records.values() if r["method"] in config.chosen]
        floors = self._tasks["languages"].floors
        for objective, title in TITLES.items():
            floor = floors[objective]
            rows = rows_of(records, objective, baseline=config.baseline, floor=floor)
            tables[objective] = rows
            if rows:
                sentences.append(f"{title}\n\n{TABLE.as_text(rows)}")
                pages.append(f"### {title[0].upper()}{title[1:]}\n\n{TABLE.as_markdown(rows)}")
        sentences.append(LEGEND)
        picture = self._directory.plots_directory / PICTURE
        draw_comparison(picture, tables, baseline=config.baseline)
        summary = {
            "status": status,
            "methods": list(config.chosen),
            "baseline": config.baseline,
            "seeds": config.seeds,
            "steps": config.training.steps,
            "entropy_floors": floors,
            "tables": tables,
            "without_ticket": [r["method"] for r in records if r["status"] == "no ticket"],
            "markdown": "\n\n".join(pages),
            "picture": str(picture),
            "wall_seconds": seconds,
            "trial_seconds": sum(record["seconds"] for record in records),
        }
        self._directory.write_summary(summary)
        spent = format_duration(summary["trial_seconds"])
        sentences.append(f"{picture}; {len(records)} trials took {spent}")
        return "\n\n".join(sentences)

    def _trial(self, name: str, objective: ObjectiveName, stop: StopRequest) -> Record:
        """Return the record of a trial, which runs now unless it is current."""
        saved = self._records.get((name, objective))
        trace_file = None
        if name in self._config.trace and objective == objective_of(name):
            trace_file = self._directory.traces_directory / f"{name}.npz"
        is_traced = trace_file is None or trace_file.exists()
        if saved is not None and self._is_current(saved) and is_traced:
            return saved
        trial = RoutersTrial(
            config=self._config,
            name=name,
            objective=objective,
            tasks=self._tasks,
            baseline=lambda: self._baseline(objective),
            trace_file=trace_file,
        )
        record, programs = run_trial(trial, stop)
        if programs is not None and name == self._config.baseline:
            self._baselines[objective] = programs
        record["data"] = self._data
        self._records[name, objective] = record
        self._file.append(record)
        say(_progress(record))
        return record

    def _is_current(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record has the present definition of its method and needs no retry."""
        if record["status"] in ("refused", "failed"):
            return False
        return record["moe"] == moe_json(self._config, record["method"])

    def _baseline(self, objective: ObjectiveName) -> RouterPrograms:
        """Return the baseline's programs; compile them if its trial ran in an earlier start."""
        if objective not in self._baselines:
            model = model_of(self._config, self._config.baseline, objective)
            batch = self._tasks["corpus"].held_out[0]
            self._baselines[objective] = RouterPrograms(self._config, model, objective, batch)
        return self._baselines[objective]


def _progress(record: Mapping[str, Any]) -> str:
    """Return the line that reports a finished trial."""
    name = f"{record['method']:24}"
    kind = record["objective"].replace("_", " ")
    if record["status"] != "done":
        return f"{name} {kind}: {record['status']}: {record['reason']}"
    bits = " ".join(f"{value:.4f}" for value in record["corpus"]["bits"])
    seconds = f"{record['seconds']:.0f} s, {record['compile_seconds']:.0f} of them compiling"
    return f"{name} {kind}: {bits} bits per byte by seed ({seconds})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
