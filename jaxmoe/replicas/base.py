# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base of the configs of methods."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from jaxmoe.replicas.fragments import Leaf
from jaxmoe.replicas.method import Method


class TrainingFacts(NamedTuple):
    """What a method is built from."""

    leaves: Sequence[Leaf]
    """Trained parameters."""
    workers: int
    """Number of workers."""
    steps: int
    """Steps of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkersBase(ABC):
    """Base of the configs of all methods."""

    name: ClassVar[str]
    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]] = "parameters"
    """What workers send one another."""

    workers: int | None = None
    """Workers, each with its own copy of the parameters; None for mesh.replica, which is otherwise
    1: all workers on the same devices, one after another."""

    def __post_init__(self):
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"replicas.workers={self.workers} must be at least 1, or None")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicasBase(WorkersBase):
    """A method of training with workers that communicate rarely."""

    @abstractmethod
    def build(self, leaves: Sequence[Leaf]) -> Method:
        """Return the method for these parameters."""
