# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tasks of the lm-evaluation-harness, on a run.

    python -m experiments.evaluate_tasks --run.directory runs/pretrain/tiny --tasks arc_easy lambada
    python -m experiments.evaluate_tasks --run.directory RUN --tasks mine --include tasks/

The harness computes the metrics; the model answers in process, on the devices of --run.mesh.* (as
in training, unless others are named). Its own tasks read data sets from the Hugging Face hub; those
of --include may read local files. What it found is printed as a table, and written whole to --to.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.evaluate import FinishedRunConfig
from experiments.evaluate_tasks.harness import harness_model, text_tokens
from jaxmoe.optional import require
from jaxmoe.run.conversion import length_of
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.training.score import Scorer

_MOST = 4096
"""Tokens of a request, where nobody says how many: its computation has that length."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTasksConfig:
    """Which tasks, of which run."""

    run: FinishedRunConfig = FinishedRunConfig()
    """The run."""
    tasks: tuple[str, ...] = ()
    """Names of tasks or groups."""
    include: str | None = None
    """A directory of tasks of one's own: YAML files."""
    num_fewshot: int | None = None
    """Examples before each question; those of the task when None."""
    limit: int | None = None
    """Questions of each task; all when None."""
    batch_size: int = 8
    """Rows that are computed together."""
    max_length: int | None = None
    """Tokens that are read at once; when None those of a training row, or what an imported model is
    for, at most 4096."""
    to: str | None = None
    """A file for the results, as JSON."""

    def __post_init__(self):
        for field in ("limit", "max_length"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ValueError(f"{field}={value} must be at least 1, or None")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot} must be 0 or more, or None")


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    prog = "python -m experiments.evaluate_tasks"
    config = cli.parse_flags(EvaluateTasksConfig(), argv, prog, __doc__ or "")
    with cli.exit_on_bad_configuration():
        start_process()
    with cli.exit_on_bad_configuration():
        if config.to is not None and not pathlib.Path(config.to).absolute().parent.is_dir():
            raise ValueError(f"to={config.to}: its directory is not there, make it first")
        results = evaluate_tasks(config)
    say(require("lm_eval.utils", extra="lm-eval").make_table(results))
    if config.to is not None:
        text = json.dumps(results, indent=2, default=str) + "\n"
        pathlib.Path(config.to).write_text(text, encoding="utf-8")
    return int(cli.ExitCode.DONE)


def evaluate_tasks(config: EvaluateTasksConfig) -> dict[str, Any]:
    """What the harness found: its own dictionary.

    Raises:
        ValueError: no tasks or unknown ones, no run, a run of ids that are no text, or several
            processes.
        MissingPackageError: the harness is not installed.
    """
    if not config.tasks:
        raise ValueError("tasks is empty: name tasks of the harness with --tasks, arc_easy say")
    if jax.process_count() > 1:
        raise ValueError("evaluate_tasks runs in one process: start it on one host")
    harness = require("lm_eval", extra="lm-eval")
    manager = require("lm_eval.tasks", extra="lm-eval").TaskManager(include_path=config.include)
    unknown = sorted(set(config.tasks) - {*manager.all_tasks})
    if unknown:
        raise ValueError(
            f"the harness has no task {', '.join(unknown)}: `lm-eval ls tasks` lists its own, and"
            " --include DIR reads yours"
        )
    assembly, state, _ = load_run(config.run.directory, config.run.step, config.run.mesh)
    usual = min(length_of(RunDirectory(config.run.directory), assembly.plan.config), _MOST)
    text = text_tokens(assembly.source)
    with jax.set_mesh(assembly.mesh):
        scorer = Scorer(
            assembly.plan.model,
            state.params,
            max_length=config.max_length or usual,
            batch_size=config.batch_size,
            router_state=state.router_state,
            execution=assembly.execution,
        )
        return harness.simple_evaluate(
            model=harness_model(scorer, text),
            tasks=list(config.tasks),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
