# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiled programs of one model, shared by trainings that differ in seed and data only.

A study trains many small models of few shapes; `Run` compiles for one training.
"""

from __future__ import annotations

import abc
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from jaxtyping import Array

from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.run.config import TrainingConfig
from jaxmoe.scaling import Parameterization
from jaxmoe.training import Objective
from jaxmoe.training.evaluate import make_eval_step
from jaxmoe.training.state import TrainState, init_state
from jaxmoe.training.step import StepMetrics, make_train_step

RARE: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Compiler options of programs that run a few times: compilation takes half the time."""


class ModelPrograms(abc.ABC):
    """Training step and evaluation of one model, each compiled on first use.

    Args:
        model: Model config with its forward multipliers.
        batch: A batch of the shapes to come.
        objective: Objective of training and evaluation.
        execution: Where and how the model is computed.
    """

    def __init__(
        self, model: ModelConfig, batch: Batch, *, objective: Objective, execution: ExecutionConfig
    ):
        self.model = model
        self.batch = batch
        self.objective = objective
        self.compile_seconds = 0.0
        self._execution = execution

    @property
    @abc.abstractmethod
    def any_state(self) -> TrainState:
        """State from which programs take their shapes."""

    @abc.abstractmethod
    def make_step(self) -> Any:
        """Return the training step, not compiled yet."""

    @functools.cached_property
    def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
        """Training step; donates its state."""
        return self.compile(self.make_step(), self.any_state, self.batch)

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, Any, Batch], tuple[Array, Array]]:
        """Program from parameters, router state and a batch to the sums of nll and weights."""
        step = make_eval_step(self.model, execution=self._execution, objective=self.objective)
        state = self.any_state
        return self.compile(step, state.params, state.router_state, self.batch, options=RARE)

    def compile(self, function: Any, *arguments: Any, options: Any = None) -> Any:
        """Compile a jitted function for the shapes of its arguments, and count the seconds."""
        started = time.perf_counter()
        compiled = function.lower(*arguments).compile(compiler_options=options)
        self.compile_seconds += time.perf_counter() - started
        return compiled


class StudyPrograms(ModelPrograms):
    """Initial state, training step and evaluation of a model with an optimiser.

    Seed and data are arguments of the programs, so that many trainings share them.

    Args:
        model: Model config with its forward multipliers.
        optimizer: Gradient transformation of the training step.
        batch: A batch of the shapes to come.
        training: Accumulation and clipping of the step.
        objective: Objective of training and evaluation.
        execution: Where and how the model is computed.
        parameterization: Initial scale per role; standard when None.
    """

    def __init__(
        self,
        model: ModelConfig,
        optimizer: optax.GradientTransformation,
        batch: Batch,
        *,
        training: TrainingConfig,
        objective: Objective,
        execution: ExecutionConfig,
        parameterization: Parameterization | None = None,
    ):
        super().__init__(model, batch, objective=objective, execution=execution)
        self._optimizer = optimizer
        self._training = training
        self._parameterization = parameterization

    @functools.cached_property
    def init(self) -> Callable[[Array], TrainState]:
        """Program from a key to a new state."""

        def first(key: Array) -> TrainState:
            return init_state(
                self.model,
                self._optimizer,
                key,
                execution=self._execution,
                parameterization=self._parameterization,
                gradients=self._training.gradients,
                parts=self._training.step_parts,
            )

        return self.compile(jax.jit(first), jax.random.key(0), options=RARE)

    def make_step(self) -> Any:
        """Return the training step, not compiled yet."""
        return self.step_with(self._optimizer)

    def step_with(self, optimizer: optax.GradientTransformation) -> Any:
        """Return the training step with another optimiser, not compiled yet."""
        return make_train_step(
            self.model,
            optimizer,
            execution=self._execution,
            **self._training.step_options(objective=self.objective),
        )

    @functools.cached_property
    def any_state(self) -> TrainState:
        """State from which programs take their shapes."""
        return self.init(jax.random.key(0))
