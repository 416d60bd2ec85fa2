# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `Backward`: how the loss of the rows of a step is differentiated, and summed.

    check(step)                        refusals, before anything is traced
    sums(step, state, rows, whole)     gradients, losses and statistics of all micro-batches

`ExecutionConfig.backward` names the member: micro-batches one after the other, or a pipeline over
`stage`. An optimiser whose update reads more than gradients names its own
(`MeasuringTransformation.backward`). An adapter may name a member that lies around it.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.catalog import choice
from jaxmoe.optim.steps import backward_name
from jaxmoe.training.accumulation import GradientSums, Rows
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


class Backward(abc.ABC):
    """Base class of the members."""

    name: ClassVar[str]
    """Name in the catalogue."""

    def check(self, step: Step) -> None:
        """Refuse what cannot be differentiated so, before anything is traced.

        Args:
            step: With the mesh resolved.

        Raises:
            ValueError: See the member.
        """
        del step

    @abc.abstractmethod
    def sums(self, step: Step, state: TrainState, rows: Rows, gathered: Any) -> GradientSums:
        """Return the sums over the micro-batches of one step.

        Args:
            step: What is trained, and how.
            state: Parameters, router state, randomness.
            rows: Rows that the objective prepared, and their division into micro-batches.
            gathered: Gathered parameters, with a layout that gathers them once a step; or None.
        """


def backward_of(step: Step) -> Backward:
    """Return the member that differentiates a step.

    Args:
        step: Model, optimiser and execution.
    """
    backward = _member(backward_name(step.optimizer) or step.execution.backward)()
    adapter = step.model.adapter
    if adapter is None or adapter.backward is None:
        return backward
    return _member(adapter.backward)(backward)


@functools.cache  # a search asks for each step
def _member(name: str) -> Callable[..., Backward]:
    return choice("backward", name)
