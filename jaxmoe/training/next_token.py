# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The next token: the objective of causal language models.

    loss = sum of loss weight * nll(target) / sum of loss weights

The batch is trained on as the loader made it. To add an objective: a config with the members of
this one, into ObjectiveConfig in `jaxmoe/training/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxmoe.data.batch import Batch
from jaxmoe.data.source import Source
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.objective import TokenGiven
from sharding.constrain import Placement


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NextTokenConfig:
    """Predict each token from those before it."""

    name: ClassVar[str] = "next_token"
    floor_note: ClassVar[str | None] = None
    """Condition under which `entropy_floor` differs from the entropy of the next token."""

    @property
    def num_examined(self) -> int:
        """Passes over a held-out batch."""
        return 1

    def check(self, model: ModelConfig) -> None:
        """Refuses a model that sees what it should predict.

        Raises:
            ValueError: naming the field.
        """
        if not model.attention.is_causal:
            raise ValueError(
                "model.attention.is_causal=False lets every position see the token that it should"
                " predict next: train it with training.objective masked_diffusion, or set"
                " is_causal to True"
            )

    def num_predicted(self, model: ModelConfig) -> int:
        """Ids that the model may predict: those below this number."""
        return model.vocab_size

    def num_tokens(self, batch: Batch) -> Float[Array, ""]:
        """What the summed loss is divided by."""
        return jnp.sum(jnp.asarray(batch.loss_weights))

    def entropy_floor(self, source: Source, sequence_length: int) -> float | None:
        """Return the lowest held-out loss in bits per token; None where it is not known.

        Args:
            source: Data source.
            sequence_length: Tokens of a row.
        """
        return source.entropy_bits_per_token(sequence_length)

    def row_tokens(self, batch: Batch) -> Float[Array, " B"]:
        """The part of each row in `num_tokens`."""
        return jnp.sum(jnp.asarray(batch.loss_weights), axis=1)

    def token_loss(self, nll: Float[Array, "B S"], given: TokenGiven) -> Float[Array, "B S"]:
        """Return the loss of each token from its negative log-likelihood, for some positions.

        Args:
            nll: Negative log-likelihood of the targets, nats.
            given: Weights and extra arrays of the same positions.
        """
        return nll * given.weights

    def prepare(self, model: ModelConfig, batch: Batch, key: Key[Array, ""], placement: Placement):
        """The batch of a training step, as it is."""
        del model, key, placement
        return batch

    def examine(
        self, model: ModelConfig, batch: Batch, index: Int[Array, ""], placement: Placement
    ) -> Batch:
        """A held-out batch, as it is."""
        del model, index, placement
        return batch
