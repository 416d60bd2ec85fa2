# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reports the loss of each worker's rows apart, which a mean over devices hides.

    loss_std, loss_range    over workers, of the mean cross-entropy of their rows, at every step

The losses come with the training step, as sums of rows, for one gather of two numbers a row.
`jaxmoe/resilience/outliers.py` names workers that differ.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch, HostOrDeviceArray
from jaxmoe.training.parts.base import StepPart
from sharding.constrain import Placement

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import StepGradients
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step

LOSS_STD = "workers/loss_std"
LOSS_RANGE = "workers/loss_range"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLosses(StepPart):
    """Mean loss of each of several equal parts of the batch."""

    name: ClassVar[str] = "worker_losses"
    reads_row_losses: ClassVar[bool] = True

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
            step.objective.row_tokens(batch),
            self.workers,
            step.execution.placement,
        )
        return gradients._replace(measures={**gradients.measures, "worker_loss": losses})


def worker_losses(
    row_nll: Float[Array, " b"] | None,
    row_tokens: Float[Array, " B"] | None,
    workers: int,
    placement: Placement,
) -> Float[Array, " W"] | None:
    """Return the mean loss of each worker, replicated on all devices; None without rows.

    Args:
        row_nll: Sums of rows over micro-batches, [B / micro-batches].
        row_tokens: Divisor of each row.
        workers: Number of equal parts of the rows, in order.
        placement: Layout of the rows.
    """
    if row_nll is None or row_tokens is None:
        return None
    tokens = row_tokens.reshape(row_nll.shape[0], -1).sum(axis=1)
    rows = (placement.place(of_rows, (None,)) for of_rows in (row_nll, tokens))
    nll, tokens = (of_rows.reshape(workers, -1).sum(axis=1) for of_rows in rows)
    return jnp.where(tokens > 0.0, nll / jnp.where(tokens > 0.0, tokens, 1.0), jnp.nan)


def loss_scalars(worker_loss: Float[HostOrDeviceArray, " W"] | None) -> dict[str, float]:
    """Return standard deviation and range over the workers that have tokens.

    Args:
        worker_loss: Losses of one step; None gives no scalars.
    """
    if worker_loss is None:
        return {}
    losses = np.asarray(worker_loss, np.float64)
    losses = losses[~np.isnan(losses)]
    if not losses.size:
        return {}
    return {LOSS_STD: float(losses.std()), LOSS_RANGE: float(np.ptp(losses))}
