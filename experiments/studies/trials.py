# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What every comparison needs: the compiled programs of a model, and a file of finished trials.

    Programs    initial state, step and evaluation, each compiled when it is first asked for; the
                seed and the data are arguments
    TrialsFile  trials.jsonl: a record per line, on the disk before the next trial begins

A comparison (`routers`, `transfer`) decides what a trial is and when its record still counts.
"""

from __future__ import annotations

import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax
from jaxtyping import Array

from experiments.cli.flags import ExitCode
from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.config import TrainingConfig
from jaxmoe.scaling import Parameterization
from jaxmoe.training import ObjectiveConfig
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.state import TrainState, init_state
from jaxmoe.training.step import StepMetrics, make_train_step

Record = dict[str, Any]

STOP_CODES = {
    "preempted": ExitCode.PREEMPTED,
    "interrupted": ExitCode.INTERRUPTED,
    "taken_over": ExitCode.TAKEN_OVER,
}
"""Exit codes of a comparison that was stopped."""

RARE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Compiler options of programs that run a few times: they compile twice as fast."""


class StoppedError(Exception):
    """A signal came; the trial is given up."""


class Programs:
    """What is compiled of one model, each when it is first asked for.

    Args:
        model: with its forward multipliers.
        optimizer: the rule of the update.
        batch: one like those to come.
        training: accumulation, clipping.
        objective: what is predicted from what.
        execution: how it is computed.
        parameterization: initial scale per role; standard when None.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        *,
        training: TrainingConfig,
        objective: ObjectiveConfig,
        execution: ExecutionConfig,
        parameterization: Parameterization | None = None,
    ):
        self.model, self.objective, self.compile_seconds = model, objective, 0.0
        self._optimizer, self._batch, self._training = optimizer, batch, training
        self._execution, self._parameterization = execution, parameterization

    @functools.cached_property
    def init(self) -> Callable[[Array], TrainState]:
        """A new state for a key."""

        def first(key: Array) -> TrainState:
            return init_state(
                self.model,
                self._optimizer,
                key,
                execution=self._execution,
                parameterization=self._parameterization,
            )

        return self._compiled(jax.jit(first), jax.random.key(0), options=RARE)

    @functools.cached_property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """The training step; donates its state."""
        return self._compiled(self._step(self._optimizer), self._any_state, self._batch)

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, Any, Batch], tuple[Array, Array]]:
        """Sum of the held-out nll and of its weights."""
        step, state = (
            make_eval_step(self.model, execution=self._execution, objective=self.objective),
            self._any_state,
        )
        return self._compiled(step, state.params, state.router_state, self._batch, options=RARE)

    def _step(self, optimizer: optax.GradientTransformation) -> Any:
        """The training step with an optimiser, not compiled yet."""
        return make_train_step(
            self.model,
            optimizer,
            execution=self._execution,
            accumulation=self._training.accumulation,
            clip=self._training.clip,
            accumulated_balance=self._training.accumulated_balance,
            objective=self.objective,
        )

    @functools.cached_property
    def _any_state(self) -> TrainState:
        return self.init(jax.random.key(0))

    def _compiled(self, function: Any, *given: Any, options: Any = None) -> Any:
        started = time.perf_counter()
        compiled = function.lower(*given).compile(compiler_options=options)
        self.compile_seconds += time.perf_counter() - started
        return compiled


class TrialsFile:
    """Records of finished trials, one JSON object per line.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes a record and waits until it is on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self, data: str) -> Iterator[Record]:
        """The records in their order; a last line that was cut in half is dropped.

        Args:
            data: digest of the data that the records' `data` must be.

        Raises:
            ValueError: they were of other data.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines.pop():
            self.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for record in map(json.loads, lines):
            if record["data"] != data:
                raise ValueError(
                    f"{self.path} holds trials on other data (another Python has another library,"
                    " whose source is the corpus): choose another directory with --run.directory"
                )
            yield record


def finite(value: Any) -> float | None:
    """A float that JSON holds: None where it is not finite."""
    return float(value) if math.isfinite(value) else None
