# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients by backpropagation, over the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from jaxmoe.data.batch import Batch
from jaxmoe.training.estimators.base import Estimate, Estimator, Problem
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackpropConfig(Estimator):
    """Backpropagation."""

    name: ClassVar[str] = "backprop"
    clips: ClassVar[Literal["norm", "projection", "nothing"]] = "norm"
    is_backward: ClassVar[bool] = True

    def estimate(
        self, problem: Problem, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> Estimate:
        """Return the gradients of one step; see the base class."""
        weight, summed, worker_loss = batch_gradients(
            state,
            batch,
            model=problem.model,
            execution=problem.execution,
            objective=problem.objective,
            accumulation=problem.accumulation,
            accumulated_balance=problem.accumulated_balance,
            workers=problem.workers,
            table=problem.table,
            skipping=problem.skipping,
            first_row=first_row,
        )
        return Estimate(weight, summed, worker_loss)
