# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of the configs of methods."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar, Literal

from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.method import Method
from jaxmoe.contrib.slow_links.weighting import Weights
from jaxmoe.contrib.slow_links.workers.of_run import RunWorkers
from jaxmoe.training.replicas import ReplicasKind, WorkersJob


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkersBase(ReplicasKind):
    """Base of the configs of the methods with workers."""

    workers: int | None = None
    """Workers, each with its own copy of the parameters; None for mesh.replica, which is otherwise
    1: all workers on the same devices, one after another."""

    def __post_init__(self):
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"replicas.workers={self.workers} must be at least 1, or None")

    def num_workers(self, places: int) -> int:
        """Return the number of workers."""
        return places if self.workers is None else self.workers

    def make_workers(self, job: WorkersJob) -> RunWorkers:
        """Return the workers of this job; see the base class."""
        number = 1 if job.place is not None else self.num_workers(job.sizes.replica)
        return RunWorkers(number, self, job)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasBase(WorkersBase):
    """A method of training with workers that communicate rarely."""

    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]] = "parameters"
    """What workers send one another."""

    @abstractmethod
    def build(self, facts: TrainingFacts) -> Method:
        """Return the method for a run.

        Args:
            facts: Parameters, workers and steps of the run.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AveragingBase(ReplicasBase):
    """A method in which all workers take the mean of their messages."""

    weights: Weights = "equal"
    """Weights of the workers in a mean: equal; the tokens that each has trained on since the last
    exchange; or the inverse of how often it participates. A worker that refused all its steps has
    the weight 0, unless weights are equal."""
