# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Who trains a run whose workers exchange parameters or gradients.

`RunWorkers` extends `WorkerGroup` of `jaxmoe/training/replicas.py`, a run without workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import jax

from jaxmoe.contrib.slow_links.workers.between_jobs import BetweenJobs
from jaxmoe.contrib.slow_links.workers.gradient_state import GradientTraining
from jaxmoe.contrib.slow_links.workers.gradient_step import make_gradient_step
from jaxmoe.contrib.slow_links.workers.local import WORKERS
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import make_worker_step
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.replicas import WorkerGroup, WorkersJob
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import CheckedStep, Step

if TYPE_CHECKING:
    from jaxmoe.contrib.slow_links.base import ReplicasBase, WorkersBase
    from jaxmoe.contrib.slow_links.gradient_base import GradientBase


class RunWorkers(WorkerGroup):
    """Workers of a run that exchange parameters or gradients.

    Args:
        number: Workers in this job.
        config: Method.
        job: What this job gives them; its place is that of one worker, or None.
    """

    state_part = WORKERS

    def __init__(self, number: int, config: WorkersBase, job: WorkersJob):
        super().__init__(number)
        self._config = config
        self._job = job
        self._member = None if job.place is None else job.place[0]

    @functools.cached_property
    def training(self) -> WorkerTraining | GradientTraining:
        """How workers exchange parameters, or gradients.

        Raises:
            ValueError: The method does not fit the mesh, or the adapter changes states itself.
        """
        return self._training_of(self._job.step_of())

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """Parts of a step that report the losses of workers, which those of parameters report."""
        return super().parts if self._config.exchanges == "gradients" else ()

    def check(self) -> None:
        """Refuse a method that does not fit the mesh, or cannot leave the program."""
        if isinstance(self.training, WorkerTraining) and self._member is not None:
            BetweenJobs(self.training)

    def jit_step(self, step: Step) -> CheckedStep:
        """Return the jitted step of the run; the exchanges between jobs are not in it."""
        training = self._training_of(step)
        if isinstance(training, GradientTraining):
            return make_gradient_step(training)
        return make_worker_step(training, exchanges=self._member is None)

    def begin(self, state: TrainState) -> TrainState:
        """Return the state of equal workers; see the base class."""
        with jax.set_mesh(self._job.mesh):
            return jax.jit(self.training.begin)(state)

    def publish(self, state: TrainState) -> TrainState:
        """Bring the parameters up to date that the world sees; see the base class."""
        return self._publish(state)

    @functools.cached_property
    def _publish(self) -> Callable[[TrainState], TrainState]:
        training = self.training
        if isinstance(training, GradientTraining) or training.method.is_shared:
            return super().publish
        return jax.jit(training.publish, donate_argnums=0)

    def _training_of(self, step: Step) -> WorkerTraining | GradientTraining:
        """Return how the workers train that take a step."""
        if self._config.exchanges == "gradients":
            config = cast("GradientBase", self._config)
            return GradientTraining.of(config, self._job.table, step, self._job.steps)
        config = cast("ReplicasBase", self._config)
        return WorkerTraining.of(config, self._job.table, step, self._job.steps, self._member)
