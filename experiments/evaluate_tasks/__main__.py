# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evaluates a run on tasks of the lm-evaluation-harness.

    jaxmoe evaluate_tasks runs/pretrain/tiny --tasks arc_easy lambada
    jaxmoe evaluate_tasks MODEL --tasks mine --include tasks/
    jaxmoe evaluate_tasks OLMoE-1B-7B-0924 --tasks arc_easy

The harness computes the metrics; the model runs in this process, on the mesh of --run.mesh.* (by
default that of the training). The harness's tasks read data sets from the Hugging Face hub; those
of --include may read local files. Results are printed as a table, and written in full to --to.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.following import after_tasks, say_next
from experiments.cli.model import with_about, with_model
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.evaluate import FinishedRunConfig
from experiments.evaluate_tasks.harness import harness_model, text_tokens
from jaxmoe.checkpoint.huggingface.hub import model_directory
from jaxmoe.data.chat import answer_end_ids
from jaxmoe.optional import require
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.provenance.saved import imported_ends, length_of, saved_config
from jaxmoe.run.provenance.tokens import model_data
from jaxmoe.serve.device.backend import sizes_for
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.pages import why_not_served
from jaxmoe.serve.engine import Executor
from jaxmoe.training.score import Scorer

logger = logging.getLogger(__name__)

_MOST = 4096
"""Upper bound of the default of --max_length, tokens: every request is padded to that length."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateTasksConfig:
    """Tasks, and the run to evaluate."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Run to evaluate."""
    tasks: tuple[str, ...] = ()
    """Names of tasks or groups."""
    include: str | None = None
    """Directory of further tasks, as YAML files."""
    num_fewshot: int | None = None
    """Examples before each question; the task's number when None."""
    limit: int | None = None
    """Number of questions per task; all when None."""
    batch_size: int = 8
    """Requests in a batch."""
    max_length: int | None = None
    """Longest request, tokens; None: the length of a training row or of the imported model, at most
    4096."""
    to: str | None = None
    """File for the results, as JSON."""

    def __post_init__(self):
        for field in ("limit", "max_length"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ValueError(f"{field}={value} must be at least 1, or None")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num_fewshot={self.num_fewshot} must be 0 or more, or None")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe evaluate_tasks"
    config = cli.parse_flags(EvaluateTasksConfig(), with_model(argv), prog, with_about(__doc__))
    with cli.exit_on_bad_configuration():
        start_process()
    with cli.exit_on_bad_configuration():
        if config.to is not None and not pathlib.Path(config.to).absolute().parent.is_dir():
            raise ValueError(f"to={config.to}: its directory does not exist, make it first")
        results = evaluate_tasks(config)
    say(require("lm_eval.utils", extra="lm-eval").make_table(results))
    if config.to is not None:
        text = json.dumps(results, indent=2, default=str) + "\n"
        pathlib.Path(config.to).write_text(text, encoding="utf-8")
    path = model_directory(config.run.directory, "run.directory")
    has_adapter = saved_config(path).model.adapter is not None
    say_next(after_tasks(config.run.directory, has_adapter=has_adapter))
    return int(cli.ExitCode.DONE)


def evaluate_tasks(config: EvaluateTasksConfig) -> dict[str, Any]:
    """Return the results of the harness, in its format.

    Args:
        config: Tasks and run.

    Raises:
        ValueError: There are no tasks, unknown tasks, no run, a run whose data is not text, or
            several processes.
        MissingPackageError: The harness is not installed.
    """
    if not config.tasks:
        raise ValueError("tasks is empty: name tasks of the harness with --tasks, such as arc_easy")
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
    path = model_directory(config.run.directory, "run.directory")
    assembly, state, _ = load_run(
        path, config.run.step, config.run.mesh, needs_data=False, initial=config.run.initial
    )
    default_length = min(length_of(RunDirectory(path), assembly.plan.config), _MOST)
    ends = imported_ends(RunDirectory(path), assembly.plan.model.vocab_size)
    answers = answer_end_ids(model_data(path), getattr(assembly.source, "tokenizer", None))
    text = text_tokens(assembly.source, (*ends, *answers))
    with jax.set_mesh(assembly.mesh):
        scorer = Scorer(
            assembly.plan.model,
            state.params,
            max_length=config.max_length or default_length,
            batch_size=config.batch_size,
            router_state=state.router_state,
            execution=assembly.execution,
        )
        return harness.simple_evaluate(
            model=harness_model(scorer, text, executor_of(assembly, state, scorer)),
            tasks=list(config.tasks),
            num_fewshot=config.num_fewshot,
            limit=config.limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )


def executor_of(assembly: Any, state: Any, scorer: Scorer) -> Callable[[], Executor] | None:
    """Return a function that makes the executor of a run; None where the engine cannot serve it.

    Args:
        assembly: Model, mesh and execution of the run.
        state: Parameters and router state.
        scorer: Scorer of the model, with the sizes.
    """
    model = assembly.plan.model
    mesh = assembly.mesh
    if (reason := why_not_served(model, assembly.execution, mesh)) is not None:
        logger.info("answers are written one after the other: %s", reason)
        return None

    def make() -> Executor:
        return ModelExecutor(
            model,
            state.params,
            state.router_state or None,
            config=sizes_for(max_length=scorer.max_length, batch_size=scorer.batch_size),
            execution=assembly.execution,
            mesh=mesh,
        )

    return make


if __name__ == "__main__":
    run_command(main)
