# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the loss of a micro-batch with the vocabulary split over stages, and its gradient.

Each stage multiplies the hidden states by its part of the head. Three numbers per token are reduced
over stages, and the gradient of the hidden states; no logits travel. The gradient is written out,
because no collective over stages may be differentiated:

    nll = log sum exp z - z[target],    dz = weight (softmax(z) - onehot(target))

Each device gathers the head once for a micro-batch and adds up the head's gradient over chunks of
positions in f32; one reduction over devices follows, in the dtype of the head in products.
"""

from __future__ import annotations

import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.cache import axis_devices
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.embedding import head_weight, output_logits
from jaxmoe.training import Objective
from jaxmoe.training.cross_entropy import chunk_length, in_chunks
from jaxmoe.training.objective import TokenGiven
from pallas_kernels.jax_versions import match_varying
from sharding import axes as ax
from sharding.constrain import Placement, zeros_of
from sharding.products.tensor_parallel import stream_positions
from sharding.regions import sum_over


@typing.no_type_check
@struct.dataclass
class HeadTokens:
    """Arrays of the tokens that the loss reads, of one micro-batch or of some positions."""

    targets: Int[Array, "B S"]
    given: TokenGiven


@typing.no_type_check
@struct.dataclass
class HeadLoss:
    """Loss of a micro-batch, equal on all stages, and its gradients."""

    loss: Float[Array, ""]
    """Sum over tokens."""
    row_loss: Float[Array, " B"]
    """Sum of each row."""
    gradients: Any
    """Gradients of norm and head of this stage; None if they are not asked for. Those of the norm
    are addends: their sum over stages is the gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineHead:
    """Final norm and head of a model, and the loss behind them."""

    model: ModelConfig
    execution: ExecutionConfig
    """`loss_chunk`, dtype and placement."""
    objective: Objective
    """Loss of a token and range of its predictions."""
    has_gradient: bool
    """Whether the gradients are computed."""
    used: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the parameters as products read them."""


def head_loss(
    head: PipelineHead,
    stream: Float[Array, "B S D"],
    params: dict[str, Any],
    tokens: HeadTokens,
    scale: Float[Array, ""],
) -> tuple[HeadLoss, Float[Array, "B S D"] | None]:
    """Return the loss of a micro-batch, and the gradient of the stream.

    Args:
        head: Norm, head and loss.
        stream: Residual stream after the last layer, equal on all stages.
        params: Final norm, and this stage's part of the head, or of a tied embedding.
        tokens: Targets and other arrays of the tokens, in the order of the stream.
        scale: Factor on the gradients.
    """
    length = stream.shape[1]
    execution = head.execution
    placement = execution.placement
    chunk = chunk_length(execution, length)
    local = -(-chunk // axis_devices(placement, ax.ACT_SEQ))
    norm = {"final_norm": params["final_norm"]}
    matrix = dict(params)
    del matrix["final_norm"]

    def copies(matrix: dict[str, Any]) -> Array:
        weight: Any = head_weight(head.used(matrix), head.model)  # biases are refused
        weight = weight.astype(execution.precision.compute_dtype)
        return _own_copies(weight, tokens.targets, placement)

    weight, pull_weight = jax.vjp(copies, matrix)

    def part(stream: Array, tokens: HeadTokens) -> tuple[HeadLoss, Array | None]:
        return _loss_of_positions(head, stream, (norm, weight), tokens, scale)

    if chunk >= length:
        total, gradient = part(stream, tokens)
    else:
        parts = _cut_chunks((stream, tokens), local, placement)
        first = jax.eval_shape(part, *jax.tree.map(lambda x: x[0], parts))

        def body(total: HeadLoss, of_chunk: tuple[Array, HeadTokens]) -> tuple[HeadLoss, Any]:
            loss, gradient = part(*of_chunk)
            return jax.tree.map(operator.add, total, loss), gradient

        total, gradient = jax.lax.scan(body, jax.tree.map(zeros_of, first[0]), parts)
        gradient = None if gradient is None else _join(gradient, length, placement)
    if total.gradients is None:
        return total, None
    of_norm, of_weight = total.gradients
    (of_matrix,) = pull_weight(of_weight.astype(weight.dtype))
    return replace(total, gradients=of_norm | of_matrix), gradient


def _own_copies(weight: Array, targets: Array, placement: Placement) -> Float[Array, "b s D V"]:
    """Return the gathered head, with one copy for each device that has other tokens.

    The gradient of a device's copy is of its own tokens.

    Args:
        weight: Matrix [D V] as stored.
        targets: Any [B S] array of the tokens.
        placement: Layout rules.
    """

    def run(weight: Array, targets: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        return match_varying(weight, targets)[None, None]

    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    region = placement.region(
        run, in_axes=((None, ax.VOCAB), rows), out_axes=(*rows, None, ax.VOCAB)
    )
    return region(weight, targets)


def _cut_chunks(tree: Any, local: int, placement: Placement) -> Any:
    """Return [B S ...] arrays as [chunks B c ...]: each device cuts its own positions.

    Args:
        tree: Arrays; their positions are laid out as those of the stream.
        local: Positions of a chunk on one device; the last chunk is padded with zeros.
        placement: Layout rules.
    """

    def axes(array: Array) -> tuple[str | None, ...]:
        return (ax.ACT_BATCH, ax.ACT_SEQ) + (None,) * (array.ndim - 2)

    region = placement.region(
        lambda tree, batch_axes: in_chunks(tree, local),
        in_axes=(jax.tree.map(axes, tree),),
        out_axes=jax.tree.map(lambda array: (None, *axes(array)), tree),
    )
    return region(tree)


def _join(parts: Array, length: int, placement: Placement) -> Array:
    """Return the inverse of `_cut_chunks`, for the gradient of a stream of this length."""
    local = length // axis_devices(placement, ax.ACT_SEQ)

    def join(parts: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        joined = jnp.moveaxis(parts, 0, 1)
        return joined.reshape(joined.shape[0], -1, joined.shape[-1])[:, :local]

    rows = (ax.ACT_BATCH, ax.ACT_SEQ, None)
    return placement.region(join, in_axes=((None, *rows),), out_axes=rows)(parts)


def _loss_of_positions(
    head: PipelineHead,
    stream: Array,
    params: tuple[dict[str, Any], Array],
    tokens: HeadTokens,
    scale: Array,
) -> tuple[HeadLoss, Array | None]:
    """Return the same for positions whose logits exist at one time; gradients are a pair, in f32.

    `params` are the norm and the copies of the head.
    """
    model, objective = head.model, head.objective
    placement = head.execution.placement
    rows = (ax.ACT_BATCH, ax.ACT_SEQ_INNER)
    gathered = stream_positions(placement)

    def multiply(hidden: Array, weight: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        if gathered:
            hidden = jax.lax.all_gather(hidden, gathered, axis=1, tiled=True)
        return output_logits(hidden, weight[0, 0], model, head.execution, is_stream=False)

    product = placement.region(
        multiply,
        in_axes=((ax.ACT_BATCH, ax.ACT_SEQ, None), (*rows, None, ax.VOCAB)),
        out_axes=(*rows, ax.ACT_VOCAB),
    )

    def logits_of(stream: Array, params: tuple[dict[str, Any], Array]) -> Array:
        norm = model.norm.build(model.embed_dim, model.norm_epsilon)
        hidden: Any = norm.apply({"params": head.used(params[0])["final_norm"]}, stream)
        return product(hidden.astype(head.execution.precision.compute_dtype), params[1])

    logits, pull_back = jax.vjp(logits_of, stream, params)
    num_here = logits.shape[-1]
    first = jax.lax.axis_index(ax.STAGE) * num_here
    ids = placement.place(jnp.arange(num_here, dtype=jnp.int32), (ax.ACT_VOCAB,)) + first
    ids = ids[None, None, :]
    num_predicted = objective.num_predicted(model)
    if num_predicted < model.vocab_size:
        logits = jnp.where(ids < num_predicted, logits, -jnp.inf)
    targets, inputs = jax.tree.map(
        lambda x: placement.place(x, rows + (None,) * (x.ndim - 2)), (tokens.targets, tokens.given)
    )
    is_target = ids == targets[:, :, None]
    top = jax.lax.pmax(jnp.max(logits, axis=-1), ax.STAGE)
    exponentials = jnp.exp(logits - top[:, :, None])
    total, chosen = sum_over(
        ax.STAGE,
        (jnp.sum(exponentials, axis=-1), jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)),
    )
    nll = top + jnp.log(total) - chosen
    losses, pull_weights = jax.vjp(lambda nll: objective.token_loss(nll, inputs), nll)
    loss = HeadLoss(loss=jnp.sum(losses), row_loss=jnp.sum(losses, axis=1), gradients=None)
    if not head.has_gradient:
        return loss, None
    (weights,) = pull_weights(jnp.ones_like(losses) * scale)
    d_logits = weights[:, :, None] * (
        exponentials / total[:, :, None] - is_target.astype(jnp.float32)
    )
    d_stream, (d_norm, d_weight) = pull_back(d_logits)
    gradients = d_norm, d_weight.astype(jnp.float32)
    return replace(loss, gradients=gradients), sum_over(ax.STAGE, d_stream)
