# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of objectives, and what they read beside the likelihood of a token.

To add an objective: a config in a file beside `jaxmoe/training/next_token.py`, and its row under
`objective` in `jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from jaxmoe.data.batch import Batch
from jaxmoe.data.source import Source
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output
from sharding.constrain import Placement
from sharding.sequence_parallel import TokenOrder


# Not checked at run time: tree functions also fill records with shapes and specs.
@typing.no_type_check
@struct.dataclass
class TokenGiven:
    """Arrays per token that `token_loss` receives, for some positions of a batch."""

    weights: Float[Array, "B S"]
    """`Batch.loss_weights`."""
    extra: dict[str, Shaped[Array, "B S ..."]] = struct.field(default_factory=dict)
    """`Batch.extra`."""


class LossCall(NamedTuple):
    """A training pass whose loss is computed."""

    model: ModelConfig
    execution: ExecutionConfig
    params: Any
    """Parameters of the model."""
    batch: Batch
    """Rows."""
    output: Output
    """Output of the model."""
    loss_of: Callable[[Float[Array, "B S D"], Batch], Float[Array, ""]]
    """(activations after a norm, rows) -> the summed loss of the head's predictions."""
    order: TokenOrder | None
    """Order in which the rows are laid out."""
    context: dict[str, Array]
    """Further arrays [B S ...] for routers."""
    options: dict[str, Any]
    """Further arguments of the pass: key, router state."""


class Objective(abc.ABC):
    """Base class of the configs of objectives: the loss of a token is its weighted likelihood."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    is_causal: ClassVar[bool]
    """Whether it predicts each token from those before it, by a causal model; else by one whose
    positions see each other."""
    reads_loss_weights: ClassVar[bool]
    """Whether weights of tokens that the data gives change the loss."""
    floor_note: ClassVar[str | None]
    """Condition under which `entropy_floor` differs from the entropy of the next token."""

    @property
    @abc.abstractmethod
    def num_examined(self) -> int:
        """Passes over a held-out batch."""

    def check(self, model: ModelConfig) -> None:
        """Raise if the model cannot be trained with it.

        Args:
            model: Model to train.

        Raises:
            ValueError: Names the field.
        """
        del model

    @abc.abstractmethod
    def num_predicted(self, model: ModelConfig) -> int:
        """Return the number of ids that may be predicted: those below it."""

    @abc.abstractmethod
    def token_counts(self, batch: Batch) -> Float[Array, "B S"]:
        """Return the part of each token in the divisor of the summed loss."""

    def num_tokens(self, batch: Batch) -> Float[Array, ""]:
        """Return the divisor of the summed loss."""
        return jnp.sum(self.token_counts(batch))

    def row_tokens(self, batch: Batch) -> Float[Array, " B"]:
        """Return the part of each row in `num_tokens`."""
        return jnp.sum(self.token_counts(batch), axis=1)

    @abc.abstractmethod
    def entropy_floor(self, source: Source, sequence_length: int) -> float | None:
        """Return the lowest held-out loss in bits per token; None where it is not known.

        Args:
            source: Data source.
            sequence_length: Tokens of a row.
        """

    def prepare(
        self, model: ModelConfig, batch: Batch, key: Key[Array, ""], placement: Placement
    ) -> Batch:
        """Return the batch of a training step; by default the rows as they are.

        Args:
            model: Model to train.
            batch: Rows of the step.
            key: Key of the step.
            placement: Where the arrays are.
        """
        del model, key, placement
        return batch

    @abc.abstractmethod
    def examine(
        self, model: ModelConfig, batch: Batch, index: Int[Array, ""], placement: Placement
    ) -> Batch:
        """Return the batch of one pass over a held-out batch.

        Args:
            model: Model to evaluate.
            batch: Held-out rows.
            index: Number of the pass, below `num_examined`.
            placement: Where the arrays are.
        """

    def token_loss(self, nll: Float[Array, "B S"], given: TokenGiven) -> Float[Array, "B S"]:
        """Return the loss of each token from its negative log-likelihood, for some positions.

        Args:
            nll: Negative log-likelihood of the targets, nats.
            given: Weights and extra arrays of the same positions.
        """
        return nll * given.weights

    def further_loss(self, call: LossCall) -> tuple[Float[Array, ""] | None, Output]:
        """Return None: the loss of the tokens is the whole loss of a training pass.

        Args:
            call: The pass.

        Returns:
            A term of the loss that is summed over tokens as theirs is, or None; and the output of
            the pass, with what the term adds to its losses and statistics.
        """
        return None, call.output

    def has_signal(self, batch: Batch) -> Bool[Array, ""] | None:
        """Return whether there is anything to learn from a batch; None where there always is.

        A step without a signal leaves parameters, optimiser and routers bitwise as they were,
        whatever the losses of balancers and adapters say, and is not counted as refused.

        Args:
            batch: Rows of a step.
        """
        del batch
        return None
