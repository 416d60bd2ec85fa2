# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Gradients`: how a step gets its gradient.

    init(table)                               state before the first step; None for most
    check(step)                               refusals, before anything is traced
    compute(step, state, batch, first_row)    gradients of one step, and the state after it

A member is a config. It reads the record of the step and the state before it, and changes neither:
clipping, the optimiser, the guard, checkpoints and reports are those of every step, and a step that
the guard refuses leaves the state of the member as it was.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.layers.rows import RowTransform
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.accumulation import GradientSums
from jaxmoe.training.state import GRADIENTS, TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step
    from sharding.pipeline import Paths


class LayerPaths(NamedTuple):
    """Groups of layers that each micro-batch of a step passes through."""

    groups_of: Paths
    """Groups of each micro-batch, in their order."""
    groups: int
    """Groups into which the layers are cut."""
    rows: Callable[[ModelConfig, Int[Array, ""]], RowTransform]
    """(model, number of a micro-batch) -> how its rows pass through the layers without stages."""


class StepGradients(NamedTuple):
    """What a step gets from a member of `Gradients`."""

    weight: Float[Array, ""]
    """Sum of the loss weights."""
    summed: GradientSums
    """Sums over the batch."""
    state: Any = None
    """State of the member after the step; None without."""
    has_signal: Bool[Array, ""] | None = None
    """See `Objective.has_signal`; the step sets it."""
    measures: dict[str, Any] = {}
    """Further fields of `StepMetrics`, which parts of the step add."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gradients(abc.ABC):
    """Base class of the members."""

    name: ClassVar[str]
    """Key in the registry."""
    clips: ClassVar[Literal["norm", "projection", "nothing"]]
    """What training.clip limits: the global norm of the gradient; each derivative along a
    direction; or nothing, and then it must be None."""
    optimizers: ClassVar[tuple[str, ...]] = ()
    """Optimisers that the method is defined with; empty for any."""
    brings: ClassVar[Mapping[str, Any]] = {}
    """Values of other fields of a run, by dotted path, that come with the choice of the estimator
    on a command line where nothing else is named."""
    is_backward: ClassVar[bool]
    """Whether there is a backward pass, of whole layers and of each worker's rows."""

    def init(self, table: ParameterTable) -> Any:
        """Return the state before the first step; None for an estimator without one.

        Args:
            table: Parameters of the model.
        """
        del table
        return None

    @abc.abstractmethod
    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step, a tree like the trained parameters.

        Args:
            step: What is differentiated.
            state: State before the step.
            batch: Rows of the step.
            first_row: Number of the first row, where the batch is part of a larger one.
        """

    def paths(self, micro_batches: int) -> LayerPaths | None:
        """Return the groups of layers that each micro-batch passes through; None for all in order.

        Args:
            micro_batches: Micro-batches of a step.
        """
        del micro_batches
        return None

    def check(self, step: Step) -> None:
        """Refuse what the estimator cannot do, before anything is traced.

        Args:
            step: With the mesh resolved.

        Raises:
            ValueError: See the estimator.
        """
        del step

    def own_state(self, state: TrainState) -> Any:
        """Return the state of the member, which `init` made.

        Args:
            state: Training state.

        Raises:
            ValueError: The training state was made without it.
        """
        if GRADIENTS not in state.parts:
            raise ValueError(
                f"state.parts has no {GRADIENTS}, which training.gradients:{self.name} carries from"
                " step to step: make the state with init_state(..., gradients=step.gradients)"
            )
        return state.parts[GRADIENTS]

    @property
    def num_passes(self) -> float:
        """Cost of a step in forward passes."""
        return 3.0

    def describe(self, step: Step) -> str | None:
        """Return the cost of a step in words; None for nothing to say.

        Args:
            step: With the mesh resolved.
        """
        del step
        return None
