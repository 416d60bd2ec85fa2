# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Who trains a run: the base class of the field `replicas`, and its member without workers.

A method of training with workers extends `ReplicasKind`, and its `make_workers` returns a
`WorkerGroup` that exchanges something. To add one: its config, and its row under `replicas` in
`jaxmoe/catalog/runs.py`; those of jaxmoe are in `jaxmoe/contrib/slow_links`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jax.sharding import Mesh

from jaxmoe.catalog import Registry
from jaxmoe.optim.groups import Optimizer
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import TrainState
from sharding.mesh import MeshConfig

if TYPE_CHECKING:
    from jaxmoe.training.step import CheckedStep, Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkersJob:
    """What a job of a run gives its workers."""

    sizes: MeshConfig
    """Mesh of the run with every size filled in."""
    mesh: Mesh
    """Devices."""
    table: ParameterTable
    """Parameters."""
    step_of: Callable[[], Step]
    """Returns the step of the whole batch, or of one worker."""
    steps: int
    """Steps of the run."""
    place: tuple[int, int] | None = None
    """Worker that this job is, and the number of workers, where each is a job of its own; None for
    a job that has all workers."""


class WorkerGroup:
    """Workers of a run; this base class is one worker, whose state all devices share.

    Args:
        number: Parts of a batch whose losses are compared, those of groups of devices.
    """

    training: Any = None
    """How workers exchange something; None where nothing is exchanged."""
    state_part: str | None = None
    """Key in `TrainState.parts` of the states of the workers; None where they share one."""

    def __init__(self, number: int):
        self.number = number

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """Parts of a step that report what is compared."""
        return () if self.number == 1 else (WorkerLosses(workers=self.number),)

    def check(self) -> None:
        """Refuse what cannot be trained so, before anything is compiled."""

    def jit_step(self, step: Step) -> CheckedStep:
        """Return the jitted step of the run; it donates its state.

        What `lower` and `compile` return of it has `memory_analysis`, as a compiled program of JAX.

        Args:
            step: Step of the whole batch, or of one worker.
        """
        return step.jit_step()

    def begin(self, state: TrainState) -> TrainState:
        """Return a state without workers as that of equal workers, if there are any.

        Args:
            state: State before the first step.
        """
        return state

    def publish(self, state: TrainState) -> TrainState:
        """Bring the parameters up to date that the world sees.

        Args:
            state: State between two steps; donated.
        """
        return state


class ReplicasKind(ABC):
    """Base class of the configs of all methods."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the catalogue and on the command line."""
    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]]
    """What workers send one another."""

    @abstractmethod
    def num_workers(self, places: int) -> int:
        """Return the number of workers.

        Args:
            places: Size of mesh.replica.
        """

    @abstractmethod
    def make_workers(self, job: WorkersJob) -> WorkerGroup:
        """Return who trains a run.

        Args:
            job: Devices, parameters and step of the run in this job.
        """

    def adapt(self, optimizer: Optimizer, steps: int) -> Optimizer:
        """Return the optimiser that the method needs in place of the one of the run.

        Args:
            optimizer: Optimiser of the run.
            steps: Steps of the run.

        Raises:
            ValueError: The method cannot be used with the optimiser.
        """
        del steps
        return optimizer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SynchronousConfig(ReplicasKind):
    """Sums gradients over all devices in every step."""

    name: ClassVar[str] = "none"
    exchanges: ClassVar[Literal["nothing", "parameters", "gradients"]] = "nothing"

    def num_workers(self, places: int) -> int:
        """Return 1: all devices train one copy of the parameters."""
        del places
        return 1

    def make_workers(self, job: WorkersJob) -> WorkerGroup:
        """Return one worker, which compares the losses of the groups of devices."""
        return WorkerGroup(job.sizes.batch_shards)


REPLICAS = Registry("replicas")
