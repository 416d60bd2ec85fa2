# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares routers: every method on the same data and budget, one table and one picture.

    python -m experiments.routers [short | full] [--methods mixtral switch ...]

Each method is trained at the baseline's active FLOPs with several seeds, paired with those of the
baseline, on text (held-out bits per byte) and on disjoint languages (bits above their exact
entropy, and how well experts tell them apart). Only causal methods stand in the autoregressive
table; those whose tokens decide about others are compared by masked diffusion. Every finished
method is a line of trials.jsonl: the same command continues after the last one. Exit codes: 0 done,
2 bad configuration, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.studies.routers.config import (
    FREE_FIELDS,
    RECIPES,
    Objective,
    RoutersConfig,
    model_of,
    objective_of,
)
from experiments.studies.routers.data import Task, load_tasks
from experiments.studies.routers.picture import draw_comparison
from experiments.studies.routers.table import LEGEND, TITLES, as_markdown, as_text, rows_of
from experiments.studies.routers.trial import Programs, moe_json, run_trial
from experiments.studies.trials import STOP_CODES, Record, StoppedError, TrialsFile
from jaxmoe.optional import require
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "routers.png"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.routers"
    recipe, config = cli.parse(RECIPES, "short", argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    directory = RunDirectory(config.run.directory or f"runs/routers/{config.run.name or recipe}")
    started = time.perf_counter()
    with StopRequest() as stop:
        with cli.exit_on_bad_configuration():
            require("matplotlib.figure")  # now, and not after twenty minutes
            directory.acquire(on_lost=stop.taken_over)
        try:
            with cli.exit_on_bad_configuration():
                config.schedule.build(config.training.steps)  # else each method is refused by it
                directory.check_config(config, free=FREE_FIELDS)
                tasks, data = load_tasks(config)
                comparison = Comparison(config, directory, tasks, data)
                directory.write_environment([str(device) for device in jax.devices()])
            status = comparison.run(stop)
            seconds = time.perf_counter() - started
            with cli.exit_on_bad_configuration():
                say(comparison.write(status, seconds))
        finally:
            directory.release()
    return int(STOP_CODES.get(status, cli.ExitCode.DONE))


class Comparison:
    """The trials of one directory, those of earlier starts included.

    Raises:
        ValueError: the trials in the directory were of other data.
    """

    def __init__(
        self, config: RoutersConfig, directory: RunDirectory, tasks: dict[str, Task], data: str
    ):
        self._config, self._directory, self._tasks, self._data = config, directory, tasks, data
        self._file = TrialsFile(directory.trials_file)
        # The newest record of each trial.
        self._records = {(r["method"], r["objective"]): r for r in self._file.read(data)}
        self._baselines: dict[Objective, Programs] = {}

    def run(self, stop: StopRequest) -> str:
        """Every trial that is missing; "done", or the reason of a stop."""
        for name in self._config.chosen:
            objective = objective_of(name)
            try:
                if objective == "masked_diffusion":
                    self._trial(self._config.baseline, objective, stop)
                record = self._trial(name, objective, stop)
                if record["status"] == "no ticket":
                    self._trial(self._config.baseline, "masked_diffusion", stop)
                    self._trial(name, "masked_diffusion", stop)
            except StoppedError:
                break
            if stop.reason is not None:
                break
        return stop.reason or "done"

    def write(self, status: str, seconds: float) -> str:
        """summary.json and the picture; the tables in words."""
        config, tables, words, pages = self._config, {}, [], []
        records = [r for r in self._records.values() if r["method"] in config.chosen]
        floors = self._tasks["languages"].floors
        for objective, title in TITLES.items():
            floor = floors[objective]
            rows = rows_of(records, objective, baseline=config.baseline, floor=floor)
            tables[objective] = rows
            if rows:
                words.append(f"{title}\n\n{as_text(rows)}")
                pages.append(f"### {title[0].upper()}{title[1:]}\n\n{as_markdown(rows)}")
        words.append(LEGEND)
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
        words.append(f"{picture}; {len(records)} trials took {spent}")
        return "\n\n".join(words)

    def _trial(self, name: str, objective: Objective, stop: StopRequest) -> Record:
        """The record of a trial, run now unless it is there."""
        known = self._records.get((name, objective))
        trace_file = None
        if name in self._config.trace and objective == objective_of(name):
            trace_file = self._directory.traces_directory / f"{name}.npz"
        is_traced = trace_file is None or trace_file.exists()
        if known is not None and self._is_current(known) and is_traced:
            return known
        record, programs = run_trial(
            self._config,
            name,
            objective,
            self._tasks,
            lambda: self._baseline(objective),
            stop,
            trace_file,
        )
        if programs is not None and name == self._config.baseline:
            self._baselines[objective] = programs
        record["data"] = self._data
        self._records[name, objective] = record
        self._file.append(record)
        say(_in_words(record))
        return record

    def _is_current(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of the method as it is defined now, and is worth keeping."""
        if record["status"] in ("refused", "failed"):
            return False
        return record["moe"] == moe_json(self._config, record["method"])

    def _baseline(self, objective: Objective) -> Programs:
        """The baseline's programs, compiled again where its trial was of an earlier start."""
        if objective not in self._baselines:
            model = model_of(self._config, self._config.baseline, objective)
            batch = self._tasks["corpus"].held_out[0]
            self._baselines[objective] = Programs(self._config, model, objective, batch)
        return self._baselines[objective]


def _in_words(record: Mapping[str, Any]) -> str:
    """A line when a trial is done."""
    name, kind = f"{record['method']:24}", record["objective"].replace("_", " ")
    if record["status"] != "done":
        return f"{name} {kind}: {record['status']}: {record['reason']}"
    bits = " ".join(f"{value:.4f}" for value in record["corpus"]["bits"])
    seconds = f"{record['seconds']:.0f} s, {record['compile_seconds']:.0f} of them compiling"
    return f"{name} {kind}: {bits} bits per byte by seed ({seconds})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
