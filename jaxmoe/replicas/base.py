# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of the configs of methods."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from jaxmoe.replicas.fragments import Leaf
from jaxmoe.replicas.kind import ReplicasKind
from jaxmoe.replicas.method import Method
from jaxmoe.replicas.weighting import Weights


class TrainingFacts(NamedTuple):
    """What a method is built from."""

    leaves: Sequence[Leaf]
    """Trained parameters."""
    workers: int
    """Number of workers."""
    steps: int
    """Steps of the run."""


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
        """Return the number of workers.

        Args:
            places: Size of mesh.replica.
        """
        return places if self.workers is None else self.workers


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
