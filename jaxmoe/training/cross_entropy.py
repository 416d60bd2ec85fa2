# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the cross-entropy of tokens, and its sum with the logits of a few positions at a time.

    nll = logsumexp(z) - z[target]

In chunks, the gradients of the hidden states and of the head are taken in the forward pass while
the logits of a chunk exist: they are computed once, and the backward pass only multiplies by the
gradient of the sum. Each device gathers the head once and adds up its gradient in f32; one
reduction over devices follows, in the dtype of the head in products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.declarations import as_factor
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_axes, only_predicted, output_logits, vocabulary_ids
from jaxmoe.training import Objective
from jaxmoe.training.objective import TokenGiven
from pallas_kernels.jax_versions import match_varying
from sharding import axes as ax
from sharding.products.tensor_parallel import stream_positions
from sharding.sequence_parallel import sequence_ranks

ChunkLoss = Callable[[Array, Any, Any], tuple[Array, Array | None]]
"""(hidden [B c D], head, targets and given [B c ...]) -> the loss and those of the rows [B]."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenPrediction:
    """What the head of a model predicts."""

    model: ModelConfig
    """Logit multiplier and vocabulary."""
    execution: ExecutionConfig
    """Dtype and placement."""
    objective: Objective
    """Loss of a token and range of its predictions."""


def token_nll(
    logits: Float[Array, "B S V"], targets: Int[Array, "B S"], *, axes: tuple[str, ...] = ()
) -> Float[Array, "B S"]:
    """Return the negative log-likelihood of each target in nats, f32.

    Args:
        logits: Logits in f32; those of the local shard if the vocabulary is sharded.
        targets: Ids in [0, V) of the whole vocabulary.
        axes: Mesh axes over which the vocabulary is sharded; three numbers per token are reduced.
    """
    # A masked sum instead of a gather: its gradient is elementwise, and V may be sharded.
    is_target = vocabulary_ids(logits, axes) == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if not axes:
        return jax.nn.logsumexp(logits, axis=-1) - chosen
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
    total = jnp.sum(jnp.exp(logits - top[:, :, None]), axis=-1)
    total, chosen = jax.lax.psum((total, chosen), axes)
    return top + jnp.log(total) - chosen


def chunked_loss(
    hidden: Float[Array, "B S D"],
    weight: Any,
    targets: Int[Array, "B S"],
    inputs: TokenGiven,
    prediction: TokenPrediction,
    *,
    chunk: int,
    has_rows: bool,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None]:
    """Return the sum of the losses of all tokens, and the sums of the rows without a gradient.

    Args:
        hidden: Activations after the final norm, laid out as the residual stream.
        weight: Result of `head_weight`.
        targets: Ids of the targets.
        inputs: Other arrays of the tokens.
        prediction: Model, execution and objective.
        chunk: Positions whose logits exist at a time; a multiple of the devices of a row.
        has_rows: Whether to sum each row.
    """
    execution = prediction.execution
    placement = execution.placement
    objective = prediction.objective
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    vocab_axes = placement.mesh_axes(ax.ACT_VOCAB)
    gathered = stream_positions(placement)
    sequence_axes = placement.mesh_axes(ax.ACT_SEQ_INNER)
    local_chunk = chunk // sequence_ranks(placement)
    num_predicted = objective.num_predicted(prediction.model)

    def chunk_loss(hidden: Array, weight: Any, tokens: Any) -> tuple[Array, Array | None]:
        targets, inputs = tokens
        logits = output_logits(hidden, weight, prediction.model, execution, is_stream=False)
        logits = only_predicted(logits, num_predicted, axes=vocab_axes)
        losses = objective.token_loss(token_nll(logits, targets, axes=vocab_axes), inputs)
        return jnp.sum(losses), jnp.sum(losses, axis=1) if has_rows else None

    def run(hidden: Array, weight: Any, tokens: Any, *, batch_axes: tuple[str, ...]) -> Any:
        if gathered:
            hidden = jax.lax.all_gather(hidden, gathered, axis=1, tiled=True)
        weight = jax.tree.map(lambda leaf: match_varying(leaf, hidden, tokens), weight)
        hidden = match_varying(hidden, weight)
        hidden, tokens = in_chunks((hidden, tokens), local_chunk)
        sums: Any = _sum_of_chunks(chunk_loss, hidden, weight, tokens)
        total, by_row = sums
        if names := batch_axes + sequence_axes:
            total = jax.lax.psum(total, names)
        if by_row is not None and sequence_axes:
            by_row = jax.lax.psum(by_row, sequence_axes)
        return total, {} if by_row is None else by_row

    hidden, weight = _apart_from_layers(hidden, weight)
    tokens = (targets, inputs)
    axes = jax.tree.map(lambda leaf: rows + (None,) * (leaf.ndim - 2), tokens)
    factor = as_factor(weight, execution.precision.compute_dtype)
    region = placement.region(
        run,
        in_axes=(
            (ax.ACT_BATCH, ax.ACT_SEQ, None),
            head_axes(factor),
            axes,
        ),
        out_axes=((), (ax.ACT_BATCH,) if has_rows else {}),
    )
    total, by_row = region(hidden, factor, tokens)
    return total, jax.lax.stop_gradient(by_row) if has_rows else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_chunks(chunk_loss: ChunkLoss, hidden: Array, weight: Any, tokens: Any) -> Any:
    """Return the sums over chunks; hidden and tokens [C B c ...] are those of one device."""

    def body(total: Array, part: tuple[Array, Any]) -> tuple[Array, Array | None]:
        hidden, tokens = part
        summed, by_row = chunk_loss(hidden, weight, tokens)
        return total + summed, by_row

    total, by_row = jax.lax.scan(body, _zero(tokens), (hidden, tokens))
    return total, None if by_row is None else jnp.sum(by_row, axis=0)


def _sums_and_gradients(
    chunk_loss: ChunkLoss, hidden: Array, weight: Any, tokens: Any
) -> tuple[Any, tuple[Array, Any]]:
    def body(carry: tuple[Array, Any], part: tuple[Array, Any]) -> tuple[Any, Any]:
        (total, d_weight), (hidden, tokens) = carry, part
        loss_and_gradients = jax.value_and_grad(chunk_loss, argnums=(0, 1), has_aux=True)
        (summed, by_row), (d_hidden, d_part) = loss_and_gradients(hidden, weight, tokens)
        d_weight = jax.tree.map(lambda d, part: d + part.astype(jnp.float32), d_weight, d_part)
        return (total + summed, d_weight), (d_hidden, by_row)

    zeros = jax.tree.map(
        lambda leaf: match_varying(jnp.zeros(leaf.shape, jnp.float32), leaf), weight
    )
    (total, d_weight), (d_hidden, by_row) = jax.lax.scan(
        body, (_zero(tokens), zeros), (hidden, tokens)
    )
    sums = total, None if by_row is None else jnp.sum(by_row, axis=0)
    return sums, (d_hidden, jax.tree.map(lambda d, leaf: d.astype(leaf.dtype), d_weight, weight))


def _scale(
    chunk_loss: ChunkLoss, gradients: tuple[Array, Any], cotangents: tuple[Array, Any]
) -> tuple[Array, Any, None]:
    del chunk_loss
    scale, _ = cotangents  # the sums of rows have no gradient
    # In f32: a factor of 8 bits would move the whole gradient.
    d_hidden, d_weight = jax.tree.map(
        lambda leaf: (leaf.astype(jnp.float32) * scale).astype(leaf.dtype), gradients
    )
    return d_hidden, d_weight, None


_sum_of_chunks.defvjp(_sums_and_gradients, _scale)


@jax.custom_vjp
def _apart_from_layers(hidden: Array, weight: Any) -> tuple[Array, Any]:
    """Return both; the head is gathered after the layers, and its gradient reduced before theirs.

    Otherwise the whole head, or its whole gradient, stays in memory while the layers are computed.
    """
    return jax.lax.optimization_barrier((hidden, weight))


_apart_from_layers.defvjp(
    lambda hidden, weight: (_apart_from_layers(hidden, weight), None),
    lambda _, gradients: jax.lax.optimization_barrier(gradients),
)


def _zero(tokens: Any) -> Array:
    return match_varying(jnp.zeros((), jnp.float32), tokens)


def chunk_length(execution: ExecutionConfig, length: int) -> int:
    """Return the positions whose logits are computed at a time.

    Args:
        execution: `loss_chunk`, rounded up to a multiple of the devices that share a sequence.
        length: Positions of a sequence.
    """
    ranks = sequence_ranks(execution.placement)
    chunk = -(-(execution.loss_chunk or length) // ranks) * ranks
    return min(chunk, length)


def in_chunks(arrays: Any, chunk: int) -> Any:
    """Return a tree of [B S ...] arrays as [S/chunk B chunk ...] arrays.

    Args:
        arrays: Arrays whose sequences are whole on each device.
        chunk: Positions per chunk; the last chunk is padded with zeros.
    """

    def split(array: Array) -> Array:
        batch, length, *trailing = array.shape
        missing = -length % chunk
        padded = jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * len(trailing))
        parts = padded.reshape(batch, (length + missing) // chunk, chunk, *trailing)
        return jnp.moveaxis(parts, 1, 0)

    return jax.tree.map(split, arrays)
