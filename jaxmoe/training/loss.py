# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the summed loss of a batch from the cross-entropy of its tokens, in nats.

    nll = logsumexp(z) - z[target]

Sums are returned, not means, so that micro-batches and devices add up exactly. With
`ExecutionConfig.loss_chunk` the logits of only that many positions exist at a time, in the forward
and in the backward pass. The loss of a token is `token_loss` of the objective.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.sequences import Order, current_order, lay_out
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, only_predicted, output_logits
from jaxmoe.models.transformer import Output, forward
from jaxmoe.training import NextTokenConfig, ObjectiveConfig
from jaxmoe.training.objective import TokenGiven
from sharding import axes as ax
from sharding.sequence_parallel import sequence_ranks


def token_nll(
    logits: Float[Array, "B S V"], targets: Int[Array, "B S"], *, axes: tuple[str, ...] = ()
) -> Float[Array, "B S"]:
    """Return the negative log-likelihood of each target in nats, f32.

    Args:
        logits: Logits in f32; those of the local shard if the vocabulary is sharded.
        targets: Ids in [0, V) of the whole vocabulary.
        axes: Mesh axes over which the vocabulary is sharded; three numbers per token are reduced.
    """
    ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    if axes:
        ids = ids + jax.lax.axis_index(axes).astype(ids.dtype) * ids.dtype.type(logits.shape[-1])
    # A masked sum instead of a gather: its gradient is elementwise, and V may be sharded.
    is_target = ids[None, None, :] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if not axes:
        return jax.nn.logsumexp(logits, axis=-1) - chosen
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
    total = jnp.sum(jnp.exp(logits - top[:, :, None]), axis=-1)
    total, chosen = jax.lax.psum((total, chosen), axes)
    return top + jnp.log(total) - chosen


def summed_loss(
    hidden: Float[Array, "B S D"],
    weight: Float[Array, "D V"],
    batch: Batch,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig | None = None,
    has_rows: bool = False,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None]:
    """Return the sum of the losses of all tokens, and the sums of the rows.

    Args:
        hidden: Activations after the final norm.
        weight: Output projection.
        batch: Targets, loss weights and extra arrays, in the order of `hidden`.
        model: Logit multiplier and vocabulary.
        execution: `loss_chunk`, dtype and placement.
        objective: Loss of a token and range of its predictions; the next token when None.
        has_rows: Whether to sum each row; the total stays bitwise the same.

    Returns:
        The total, and the sums of the rows or None.
    """
    objective = objective or NextTokenConfig()
    num_predicted = objective.num_predicted(model)
    placement, rows = execution.placement, (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    vocab_axes = placement.mesh_axes(ax.ACT_VOCAB)
    island = placement.island(
        lambda logits, targets, batch_axes: token_nll(logits, targets, axes=vocab_axes),
        in_axes=((*rows, ax.ACT_VOCAB), rows),
        out_axes=rows,
    )

    def place(array: Array, axes: tuple[str | None, ...]) -> Array:
        return placement.place(array, axes + (None,) * (array.ndim - len(axes)))

    def chunk_sum(hidden: Array, targets: Array, given: TokenGiven) -> tuple[Array, Array | None]:
        logits = output_logits(hidden, weight, model, execution, is_stream=is_whole)
        if num_predicted < model.vocab_size:
            logits = only_predicted(logits, num_predicted)
        nll = island(logits, targets)
        losses = objective.token_loss(nll, jax.tree.map(lambda leaf: place(leaf, rows), given))
        return jnp.sum(losses), jnp.sum(losses, axis=1) if has_rows else None

    weights, extra = jnp.asarray(batch.loss_weights), jax.tree.map(jnp.asarray, batch.extra)
    arrays = (hidden, jnp.asarray(batch.targets), TokenGiven(weights=weights, extra=extra))
    chunk = chunk_length(execution, hidden.shape[1])
    is_whole = chunk == hidden.shape[1]
    if is_whole:
        return chunk_sum(*arrays)

    def body(total: Array, part: tuple[Any, ...]) -> tuple[Array, Array | None]:
        summed, by_row = jax.checkpoint(chunk_sum)(*part)
        return total + summed, by_row

    arrays = jax.tree.map(lambda leaf: place(leaf, (ax.ACT_BATCH,)), arrays)
    parts = in_chunks(arrays, chunk)
    total, by_row = jax.lax.scan(body, jnp.zeros((), jnp.float32), parts)
    return total, None if by_row is None else jnp.sum(by_row, axis=0)


def forward_and_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    objective: ObjectiveConfig | None = None,
    **given: Any,
) -> tuple[Float[Array, ""], Output]:
    """Return the summed loss of a batch and the output of the model.

    Args:
        model: Model to compute.
        execution: How it is computed.
        params: Parameters of the model.
        batch: Rows; tokens with loss weight 0 are left out.
        objective: See `summed_loss`.
        **given: Further arguments of `jaxmoe.models.transformer.forward`.

    Returns:
        The sum in nats, and the output in the order of `lay_out_batch`.
    """
    nll, _, output = forward_and_row_nll(
        model, execution, params, batch, objective=objective, has_rows=False, **given
    )
    return nll, output


def forward_and_row_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    objective: ObjectiveConfig | None = None,
    has_rows: bool = True,
    **given: Any,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None, Output]:
    """Return the result of `forward_and_nll`, with the sums of the rows in the middle.

    Args:
        model: Model to compute.
        execution: How it is computed.
        params: Parameters of the model.
        batch: Rows; tokens with loss weight 0 are left out.
        objective: See `summed_loss`.
        has_rows: Whether to sum each row; None stands in their place otherwise.
        **given: Further arguments of `jaxmoe.models.transformer.forward`.
    """
    batch, order = lay_out_batch(batch, model, execution)
    output = forward(
        model,
        execution,
        params,
        jnp.asarray(batch.tokens),
        positions=batch.positions,
        segment_ids=batch.segment_ids,
        context={} if batch.mask_ratio is None else {"mask_ratio": jnp.asarray(batch.mask_ratio)},
        has_logits=False,
        places=order,
        **given,
    )
    nll, rows = summed_loss(
        output.hidden,
        head_weight(params, model),
        batch,
        model=model,
        execution=execution,
        objective=objective,
        has_rows=has_rows,
    )
    return nll, rows, output


def lay_out_batch(
    batch: Batch, model: ModelConfig, execution: ExecutionConfig
) -> tuple[Batch, Order | None]:
    """Return the batch in the order in which sequence-parallel devices hold its tokens.

    Args:
        batch: Rows in the order of their tokens.
        model: Model that reads the batch.
        execution: How it is computed.

    Returns:
        The batch, and for each token its position in the original row; None if nothing moved.
    """
    segments = None if batch.segment_ids is None else jnp.asarray(batch.segment_ids)
    order = current_order(model.context, execution, batch.tokens.shape[1], segments)
    return lay_out(batch, order, execution), order


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
        batch, length, *rest = array.shape
        missing = -length % chunk
        padded = jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * len(rest))
        parts = padded.reshape(batch, (length + missing) // chunk, chunk, *rest)
        return jnp.moveaxis(parts, 1, 0)

    return jax.tree.map(split, arrays)
