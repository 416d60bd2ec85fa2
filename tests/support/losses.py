# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The summed cross-entropy of given targets and weights, without a batch."""

from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.loss import summed_loss


def summed_nll(
    hidden: Float[Array, "B S D"],
    weight: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    loss_weights: Float[Array, "B S"],
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
) -> Float[Array, ""]:
    batch = Batch(tokens=targets, targets=targets, loss_weights=loss_weights)
    return summed_loss(hidden, weight, batch, model=model, execution=execution)[0]
