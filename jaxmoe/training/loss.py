# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of the next token, in nats, a few positions at a time.

    nll = logsumexp(z) - z[target]

The sums are returned, not the mean: micro-batches and devices add up exactly. With `loss_chunk` the
logits of only that many positions exist at a time, forward and backward. The sums of single rows
come beside the whole one where somebody asks for them: it stays bitwise what it is without them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.embedding import head_weight, only_predicted, output_logits
from jaxmoe.layers.sequences import Order, current_order, lay_out
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output, forward
from sharding import axes as ax


def token_nll(
    logits: Float[Array, "B S V"], targets: Int[Array, "B S"], *, axes: tuple[str, ...] = ()
) -> Float[Array, "B S"]:
    """Negative log-likelihood of each target, nats, f32.

    Args:
        logits: f32; of the ids held here, where the vocabulary is cut.
        targets: ids in [0, V) of the whole vocabulary.
        axes: mesh axes over which the vocabulary is cut; three numbers per token travel there.
    """
    ids = jnp.arange(logits.shape[-1], dtype=targets.dtype)
    if axes:
        ids = ids + jax.lax.axis_index(axes).astype(ids.dtype) * ids.dtype.type(logits.shape[-1])
    # A masked sum instead of a gather: its gradient is elementwise, and V may be spread.
    is_target = ids[None, None, :] == targets[:, :, None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    if not axes:
        return jax.nn.logsumexp(logits, axis=-1) - chosen
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), axes)
    total = jnp.sum(jnp.exp(logits - top[:, :, None]), axis=-1)
    total, chosen = jax.lax.psum((total, chosen), axes)
    return top + jnp.log(total) - chosen


def summed_nll(
    hidden: Float[Array, "B S D"],
    weight: Float[Array, "D V"],
    targets: Int[Array, "B S"],
    loss_weights: Float[Array, "B S"],
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    num_predicted: int | None = None,
) -> Float[Array, ""]:
    """Sum over tokens of loss weight times negative log-likelihood, nats.

    Args:
        hidden: after the final norm.
        weight: of the head.
        targets: ids in [0, V).
        loss_weights: 0 leaves a token out.
        model: for the logit multiplier.
        execution: for `loss_chunk`, dtype and placement.
        num_predicted: ids from this one on have probability 0; None: every id may be predicted.
    """
    total, _ = _summed_nll(
        (hidden, weight, targets, loss_weights), model, execution, num_predicted, has_rows=False
    )
    return total


def _summed_nll(
    given: tuple[Array, Array, Array, Array],
    model: ModelConfig,
    execution: ExecutionConfig,
    num_predicted: int | None,
    *,
    has_rows: bool,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None]:
    """The sum of `summed_nll`, and those of the rows if asked for."""
    hidden, weight, targets, loss_weights = given

    def chunk_sum(hidden: Array, targets: Array, loss_weights: Array) -> tuple[Array, Array | None]:
        logits = output_logits(hidden, weight, model, execution, is_stream=is_whole)
        if num_predicted is not None and num_predicted < model.vocab_size:
            logits = only_predicted(logits, num_predicted)
        nll = island(logits, targets)
        weighted = nll * placement.place(loss_weights, rows)
        return jnp.sum(weighted), jnp.sum(weighted, axis=1) if has_rows else None

    placement, rows = execution.placement, (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    vocab_axes = placement.mesh_axes(ax.ACT_VOCAB)
    island = placement.island(
        lambda logits, targets, batch_axes: token_nll(logits, targets, axes=vocab_axes),
        in_axes=((*rows, ax.ACT_VOCAB), rows),
        out_axes=rows,
    )
    length, chunk = hidden.shape[1], execution.loss_chunk
    is_whole = not chunk or chunk >= length
    if is_whole:
        return chunk_sum(hidden, targets, loss_weights)

    def body(total: Array, part: tuple[Array, ...]) -> tuple[Array, Array | None]:
        summed, by_row = jax.checkpoint(chunk_sum)(*part)
        return total + summed, by_row

    by_row = (ax.ACT_BATCH, None)
    whole = (
        placement.place(hidden, (*by_row, None)),
        placement.place(targets, by_row),
        placement.place(loss_weights, by_row),
    )
    parts = in_chunks(whole, chunk)
    total, by_row = jax.lax.scan(body, jnp.zeros((), jnp.float32), parts)
    return total, None if by_row is None else jnp.sum(by_row, axis=0)


def forward_and_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    num_predicted: int | None = None,
    **given: Any,
) -> tuple[Float[Array, ""], Output]:
    """Sum over a batch of loss weight times negative log-likelihood, nats, and the model's output.

    The output is in the order of `lay_out_batch`.

    Args:
        model: what is computed.
        execution: how.
        params: of the model.
        batch: of which `loss_weights` 0 leaves a token out.
        num_predicted: see `summed_nll`.
        **given: further arguments of the transformer.
    """
    nll, _, output = forward_and_row_nll(
        model, execution, params, batch, num_predicted=num_predicted, has_rows=False, **given
    )
    return nll, output


def forward_and_row_nll(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    batch: Batch,
    *,
    num_predicted: int | None = None,
    has_rows: bool = True,
    **given: Any,
) -> tuple[Float[Array, ""], Float[Array, " B"] | None, Output]:
    """As `forward_and_nll`, with the sum of each row between the two, if asked for.

    Args:
        model: what is computed.
        execution: how.
        params: of the model.
        batch: of which `loss_weights` 0 leaves a token out.
        num_predicted: see `summed_nll`.
        has_rows: whether to sum the rows.
        **given: further arguments of the transformer.
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
    given_to_head = (
        output.hidden,
        head_weight(params, model),
        jnp.asarray(batch.targets),
        jnp.asarray(batch.loss_weights),
    )
    nll, rows = _summed_nll(given_to_head, model, execution, num_predicted, has_rows=has_rows)
    return nll, rows, output


def lay_out_batch(
    batch: Batch, model: ModelConfig, execution: ExecutionConfig
) -> tuple[Batch, Order | None]:
    """The batch with the tokens of each row where the devices that share it hold them.

    Args:
        batch: in the order of its tokens; targets are what follows each.
        model: what is computed.
        execution: how.

    Returns:
        The batch, and of each token the place that it had in its row.
    """
    segments = None if batch.segment_ids is None else jnp.asarray(batch.segment_ids)
    order = current_order(model, execution, batch.tokens.shape[1], segments)
    return lay_out(batch, order, execution), order


def in_chunks(arrays: tuple[Array, ...], chunk: int) -> tuple[Array, ...]:
    """[B S ...] arrays as [S/chunk B chunk ...]; the last chunk is filled with zeros, of weight 0.

    Args:
        arrays: whose sequences lie whole on a device.
        chunk: positions.
    """

    def split(array: Array) -> Array:
        batch, length, *rest = array.shape
        missing = -length % chunk
        padded = jnp.pad(array, ((0, 0), (0, missing)) + ((0, 0),) * len(rest))
        parts = padded.reshape(batch, (length + missing) // chunk, chunk, *rest)
        return jnp.moveaxis(parts, 1, 0)

    return tuple(map(split, arrays))
