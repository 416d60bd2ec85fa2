# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients by backpropagation, over the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jaxmoe.data.batch import Batch
from jaxmoe.training.estimators.backward import backward_of
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import TrainState

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackpropConfig(Gradients):
    """Backpropagation."""

    name: ClassVar[str] = "backprop"
    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "norm"
    is_backward: ClassVar[bool] = True

    def check(self, step: Step) -> None:
        """Refuse what the backward pass cannot do; see `Backward.check`."""
        backward_of(step).check(step)

    def compute(
        self, step: Step, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> StepGradients:
        """Return the gradients of one step; see the base class."""
        return StepGradients(*batch_gradients(step, state, batch, first_row))
