# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the base class of objectives, and what they read beside the likelihood of a token.

An objective is a member of `ObjectiveConfig` that extends `Objective`, with these members:

    num_examined                    passes over a held-out batch
    check(model)                    raises if the model cannot be trained with it
    num_predicted(model)            ids below this number may be predicted
    num_tokens(batch)               divisor of the summed loss
    row_tokens(batch)               the part of each row in `num_tokens`, [B]
    prepare(model, batch, key, placement)     the batch of a training step
    examine(model, batch, index, placement)   pass `index` over a held-out batch
    token_loss(nll, given)          loss of each token, [B S]
    further_loss(...)               a term of training passes beside it, or None
    has_signal(batch)               whether there is anything to learn from a batch, or None

To add an objective: a config in a file beside `jaxmoe/training/next_token.py`, and a line in the
union of `jaxmoe/training/__init__.py`.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, ClassVar

from flax import struct
from jaxtyping import Array, Bool, Float, Shaped

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig


# Not checked at run time: tree functions also fill records with shapes and specs.
@typing.no_type_check
@struct.dataclass
class TokenGiven:
    """Arrays per token that `token_loss` receives, for some positions of a batch."""

    weights: Float[Array, "B S"]
    """`Batch.loss_weights`."""
    extra: dict[str, Shaped[Array, "B S ..."]] = struct.field(default_factory=dict)
    """`Batch.extra`."""


class Objective:
    """Base class of the configs of objectives: the loss of a token is its weighted likelihood."""

    __slots__ = ()

    reads_answers: ClassVar[bool] = False
    """Whether it trains on sampled answers and their rewards, which rollouts make."""

    def token_loss(self, nll: Float[Array, "B S"], given: TokenGiven) -> Float[Array, "B S"]:
        """Return the loss of each token from its negative log-likelihood, for some positions.

        Args:
            nll: Negative log-likelihood of the targets, nats.
            given: Weights and extra arrays of the same positions.
        """
        return nll * given.weights

    def further_loss(
        self,
        model: ModelConfig,
        execution: ExecutionConfig,
        params: Any,
        batch: Batch,
        loss_of: Callable[[Float[Array, "B S D"]], Float[Array, ""]],
        given: dict[str, Any],
    ) -> Float[Array, ""] | None:
        """Return None: the loss of the tokens is the whole loss of a training pass.

        Args:
            model: Model to compute.
            execution: How it is computed.
            params: Parameters of the model.
            batch: Rows.
            loss_of: Summed loss of activations after the final norm.
            given: Arguments of the pass.
        """
        del model, execution, params, batch, loss_of, given
        return None

    def has_signal(self, batch: Batch) -> Bool[Array, ""] | None:
        """Return whether there is anything to learn from a batch; None where there always is.

        A step without a signal leaves parameters, optimiser and routers bitwise as they were,
        whatever the losses of balancers and adapters say, and is not counted as refused.

        Args:
            batch: Rows of a step.
        """
        del batch
        return None
