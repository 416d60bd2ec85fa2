# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reports the loss of each worker's rows apart, for `jaxmoe/training/measures/dispersion.py`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

from jaxmoe.data.batch import Batch
from jaxmoe.training.estimators.backward import num_passes
from jaxmoe.training.measures.dispersion import worker_losses
from jaxmoe.training.parts.base import StepPart

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import StepGradients
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLosses(StepPart):
    """Mean loss of each of several equal parts of the batch."""

    name: ClassVar[str] = "worker_losses"
    reads_rows: ClassVar[bool] = True

    workers: int
    """Number of equal parts of the rows, in order; at least 2."""

    def __post_init__(self):
        if self.workers < 2:
            raise ValueError(f"workers={self.workers} must be at least 2 to be compared")

    def update(
        self, step: Step, state: TrainState, batch: Batch, gradients: StepGradients
    ) -> StepGradients:
        """Return the gradients with `worker_loss` among the measures."""
        del state
        losses = worker_losses(
            gradients.summed.row_nll,
            num_passes(step.model) * step.objective.row_tokens(batch),
            self.workers,
            step.execution.placement,
        )
        return gradients._replace(measures={**gradients.measures, "worker_loss": losses})
