# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Next-token prediction: the objective of causal language models.

    loss = sum of loss weight * nll(target) / sum of loss weights

The batch is used as the loader made it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.data.source import Source
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.objective import Objective
from sharding.constrain import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CausalObjective(Objective):
    """Base class of objectives that train on each token after those before it."""

    is_causal: ClassVar[bool] = True
    reads_loss_weights: ClassVar[bool] = True
    floor_note: ClassVar[str | None] = None
    """Condition under which `entropy_floor` differs from the entropy of the next token."""

    @property
    def num_examined(self) -> int:
        """Passes over a held-out batch."""
        return 1

    def num_predicted(self, model: ModelConfig) -> int:
        """Return the number of ids that may be predicted."""
        return model.vocab_size

    def entropy_floor(self, source: Source, sequence_length: int) -> float | None:
        """Return the lowest held-out loss in bits per token; None where it is not known."""
        return source.entropy_bits_per_token(sequence_length)

    def examine(
        self, model: ModelConfig, batch: Batch, index: Int[Array, ""], placement: Placement
    ) -> Batch:
        """Return a held-out batch unchanged."""
        del model, index, placement
        return batch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenConfig(CausalObjective):
    """Predict each token from those before it."""

    name: ClassVar[str] = "next_token"

    def token_counts(self, batch: Batch) -> Float[Array, "B S"]:
        """Return the loss weights."""
        return jnp.asarray(batch.loss_weights)
