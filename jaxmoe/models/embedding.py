# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Embeds tokens, and computes logits from hidden states.

The head is a plain function of its weight, so that a loss can apply it to a few positions at a
time and the whole [B S V] need not exist.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import FACTORS, VALUES, Declaration, declare
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from sharding import axes as ax
from sharding.products.low_rank import LowRank
from sharding.products.tensor_parallel import Product, out_of_stream


class Embedding(nn.Module):
    """Declares the table of token embeddings."""

    model: ModelConfig

    @nn.compact
    def __call__(self) -> Float[Array, "V D"]:
        """Return the table, f32."""
        table = Declaration(
            shape=(self.model.vocab_size, self.model.embed_dim),
            axes=(ax.VOCAB, ax.EMBED),
            role="embedding",
        )
        return declare(self, "weight", table)


# Not checked at run time: tree functions also fill it with axes.
@typing.no_type_check
@struct.dataclass
class BiasedHead:
    """The matrix of a head, and its biases."""

    matrix: Float[Array, "D V"]
    bias: Float[Array, " V"]

    def astype(self, dtype: Any) -> BiasedHead:
        """Return the matrix in another dtype, and the biases as they are."""
        return dataclasses.replace(self, matrix=self.matrix.astype(dtype))


HeadWeight = Float[Array, "D V"] | BiasedHead
"""The matrix of a head, with biases where the model has them."""


def head_axes(weight: Any) -> Any:
    """Return the logical axes of a head whose matrix is gathered but for the vocabulary."""
    axes: Any = (None, ax.VOCAB)
    return BiasedHead(axes, axes[1:]) if isinstance(weight, BiasedHead) else axes


class Head(nn.Module):
    """Declares the matrix from the residual stream to the logits, unless it is the embedding, and
    the biases of logits."""

    model: ModelConfig

    @nn.compact
    def __call__(self, table: Float[Array, "V D"]) -> HeadWeight:
        """Return the matrix and the biases, f32.

        Args:
            table: Embedding of each token.
        """
        model = self.model
        weight = table.T
        if not model.has_tied_embeddings:
            matrix = Declaration(
                shape=(model.embed_dim, model.vocab_size), axes=(ax.EMBED, ax.VOCAB), role="head"
            )
            weight = declare(self, "weight", matrix)
        if not model.extras.has_head_bias:
            return weight
        row = Declaration(
            shape=(model.vocab_size,), axes=(ax.VOCAB,), role="state", matrix=None, init="zeros"
        )
        return BiasedHead(weight, declare(self, "bias", row))


def head_weight(params: dict[str, Any], model: ModelConfig) -> HeadWeight:
    """Return the head's matrix among the parameters: its own, or the transposed embedding, with the
    addition of an adapter; and the biases of a head that has them."""
    module = params["embedding" if model.has_tied_embeddings else "head"]
    weight = module["weight"]
    if "weight:down" in module:
        weight = LowRank(weight=weight, **{name: module[f"weight:{name}"] for name in FACTORS})
        weight = weight.with_values(module.get(f"weight:{VALUES}")).merge()
    weight = weight.T if model.has_tied_embeddings else weight
    return BiasedHead(weight, params["head"]["bias"]) if model.extras.has_head_bias else weight


def output_logits(
    hidden: Float[Array, "B S D"],
    weight: HeadWeight,
    model: ModelConfig,
    execution: ExecutionConfig,
    *,
    is_stream: bool = True,
) -> Float[Array, "B S V"]:
    """Return logits in f32, cut by vocabulary where the head is.

    Args:
        hidden: Hidden states after the final norm.
        weight: Result of `head_weight`.
        model: Logit multiplier and bound.
        execution: Dtype and placement.
        is_stream: Whether hidden is cut as the residual stream; False where its positions are cut
            as within a sublayer.
    """
    dtype = execution.precision.compute_dtype
    spread = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    matrix = weight.matrix if isinstance(weight, BiasedHead) else weight
    product = Product(
        "bsd,dv->bsv",
        matrix.astype(dtype),
        (None, ax.VOCAB),
        (*spread, ax.ACT_VOCAB),
        jnp.float32,
    )
    products = {"logits": product}
    placement = execution.placement
    logits = out_of_stream(hidden.astype(dtype), products, placement, is_stream=is_stream)["logits"]
    if isinstance(weight, BiasedHead):
        axes = (*spread, ax.ACT_VOCAB)
        add = placement.region(_add_bias, in_axes=(axes, (ax.VOCAB,)), out_axes=axes)
        logits = add(logits, weight.bias)
    logits = logits * jnp.float32(model.forward_multipliers.logits)
    if model.extras.logits_softcap is None:
        return logits
    bound = jnp.float32(model.extras.logits_softcap)
    return bound * jnp.tanh(logits / bound)


def _add_bias(logits: Array, bias: Array, *, batch_axes: tuple[str, ...]) -> Array:
    del batch_axes
    return logits + bias.astype(jnp.float32)[None, None]


def only_predicted(
    logits: Float[Array, "B S V"], num_predicted: int, *, axes: tuple[str, ...] = ()
) -> Float[Array, "B S V"]:
    """Return the logits with -inf for the ids from `num_predicted` on (masks are not predicted).

    Args:
        logits: Logits; those of the local shard if the vocabulary is sharded.
        num_predicted: Ids that may be predicted.
        axes: Mesh axes over which the vocabulary is sharded.
    """
    if not axes and num_predicted >= logits.shape[-1]:
        return logits
    return jnp.where(vocabulary_ids(logits, axes) < num_predicted, logits, -jnp.inf)


def vocabulary_ids(logits: Float[Array, "B S V"], axes: tuple[str, ...]) -> Int[Array, "1 1 V"]:
    """Return the id of each logit.

    Args:
        logits: Logits; those of the local shard if the vocabulary is sharded.
        axes: Mesh axes over which the vocabulary is sharded.
    """
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    if axes:
        ids = ids + jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(logits.shape[-1])
    return ids[None, None, :]
