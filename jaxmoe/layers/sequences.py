# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the form of attention over sequences cut over devices, and the order of their tokens.

A form may need the tokens of a row in another order, so that all devices have equal work. Token
ids and other [B S] arrays are permuted where a batch enters, which costs little; activations are
permuted only where the order of the tokens is asked for.

    order       token held at each position of a row that is laid out
    lay_out     x[:, order]
    lay_back    its inverse, on activations: the whole row is gathered
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.context import AttentionHeads, LayerContext
from jaxmoe.layers.records import TokenInputs
from pallas_kernels.sequence_layout import lay_out as in_order
from sharding import axes as ax
from sharding.sequence_parallel import (
    AttentionSizes,
    FormChoice,
    SequenceForm,
    TokenOrder,
    sequence_ranks,
)

_NO_HEADS = AttentionHeads(num_heads=1, num_kv_heads=1, head_dim=1, value_dim=1, is_causal=True)
"""Heads of a model in which no layer attends."""


def attention_sizes(
    context: LayerContext,
    execution: ExecutionConfig,
    length: int,
    mesh: Mapping[str, int],
    heads: AttentionHeads | None = None,
) -> AttentionSizes:
    """Return the sizes of a mixer, or those by which a form of attention is chosen.

    Args:
        context: Model-wide numbers, with the heads of every kind of mixer.
        execution: Layout rules and dtype.
        length: Positions of a row.
        mesh: {axis or piece of one: size}.
        heads: Heads of the mixer; when None those of the first without a window, which costs most.
    """
    heads = heads or min(
        context.heads, key=lambda heads: heads.window is not None, default=_NO_HEADS
    )
    rules = execution.axis_rules

    def devices(name: str) -> int:
        return math.prod(mesh.get(axis, 1) for axis in rules.mesh_axes(name))

    return AttentionSizes(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        length=length,
        ranks=devices(ax.ACT_SEQ_INNER),
        tensor=devices(ax.ACT_HEADS),
        itemsize=jnp.dtype(execution.precision.compute_dtype).itemsize,
        is_causal=heads.is_causal,
        window=heads.window,
        keeps_order=context.keeps_order,
    )


def check_rows(
    context: LayerContext, execution: ExecutionConfig, length: int, mesh: Mapping[str, int]
) -> SequenceForm:
    """Return the form of attention on a mesh, if every mixer can run in it.

    Args:
        context: Model-wide numbers.
        execution: Form, layout rules and dtype.
        length: Positions of a row.
        mesh: {axis or piece of one: size}.

    Raises:
        ValueError: Heads or lengths that the form cannot spread.
    """
    form = choose_form(context, execution, length, mesh).config
    cut = execution.axis_rules.mesh_axes(ax.ACT_SEQ_INNER)
    if math.prod(mesh.get(axis, 1) for axis in cut) > 1:
        form.check_pieces({axis: mesh.get(axis, 1) for axis in cut})
    for heads in context.heads:
        sizes = attention_sizes(context, execution, length, mesh, heads)
        form.check(sizes)
    return form


def choose_form(
    context: LayerContext, execution: ExecutionConfig, length: int, mesh: Mapping[str, int]
) -> FormChoice:
    """Return the form of attention on a mesh, unchecked, and the reason for it.

    Args:
        context: Model-wide numbers.
        execution: Form, layout rules and dtype.
        length: Positions of a row.
        mesh: {axis or piece of one: size}.
    """
    return execution.sequence_parallel.choose(attention_sizes(context, execution, length, mesh))


def current_form(context: LayerContext, execution: ExecutionConfig, length: int) -> SequenceForm:
    """Return the form of attention on the current mesh; see `check_rows`."""
    mesh = jax.sharding.get_abstract_mesh().shape if sequence_ranks(execution.placement) > 1 else {}
    return check_rows(context, execution, length, mesh)


def current_order(
    context: LayerContext,
    execution: ExecutionConfig,
    length: int,
    segment_ids: Int[Array, "B S"] | None = None,
    arrays: Mapping[str, Array] = MappingProxyType({}),
) -> TokenOrder | None:
    """Return the order of rows on the current mesh, or None where rows stay as they are.

    Args:
        context: Model-wide numbers.
        execution: Form and layout rules.
        length: Positions of a row.
        segment_ids: Documents, in the order of the tokens.
        arrays: Scalars of the micro-batch, of which the form takes those of `SequenceForm.reads`.
    """
    form = current_form(context, execution, length)
    ranks = sequence_ranks(execution.placement)
    if segment_ids is None or form.layout != "document_zigzag" or ranks == 1:
        arrays = {name: arrays[name] for name in form.reads if name in arrays}
        tokens = form.token_order(length, ranks, arrays=arrays)
        if tokens is None:
            return None
        if not isinstance(tokens, jax.Array) or segment_ids is None:
            return TokenOrder(tokens)
        by_row = jnp.broadcast_to(tokens, (segment_ids.shape[0], length))
        return TokenOrder(execution.placement.place(by_row, (ax.ACT_BATCH, None)), arrays)

    def run(segment_ids: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        return jnp.asarray(form.token_order(length, ranks, segment_ids))

    axes = (ax.ACT_BATCH, None)
    region = execution.placement.region(run, in_axes=(axes,), out_axes=axes)
    return TokenOrder(region(jnp.asarray(segment_ids)))


def lay_out(arrays: Any, order: TokenOrder | None, execution: ExecutionConfig) -> Any:
    """Return the arrays of a tree with the tokens of each row in this order.

    Args:
        arrays: Arrays [B S ...].
        order: Order of the tokens; None leaves them.
        execution: Placement of the arrays.
    """
    if order is None:
        return arrays
    arrays = jax.tree.map(jnp.asarray, arrays)
    axes = jax.tree.map(lambda x: (ax.ACT_BATCH,) + (None,) * (x.ndim - 1), arrays)
    return _permute(arrays, axes, order.tokens, execution)


def lay_back(
    x: Float[Array, "B S D"], order: TokenOrder | None, execution: ExecutionConfig
) -> Float[Array, "B S D"]:
    """Return activations in the order of the tokens.

    Args:
        x: Activations laid out.
        order: Argument that `lay_out` received.
        execution: Placement of the activations.
    """
    if order is None:
        return x
    return execution.placement.place(
        _permute(x, (ax.ACT_BATCH, None, None), inverse_of(order).tokens, execution),
        (ax.ACT_BATCH, ax.ACT_SEQ, ax.ACT_EMBED),
    )


def inverse_of(order: TokenOrder) -> TokenOrder:
    """Return the order that gives what was laid out in another back its own."""
    tokens = order.tokens
    return TokenOrder(
        np.argsort(tokens) if isinstance(tokens, np.ndarray) else jnp.argsort(tokens, axis=-1)
    )


def places_of(order: TokenOrder | None, length: int) -> Int[Array, "#B S"]:
    """Return the place of each token in its row."""
    places = jnp.asarray(np.arange(length, dtype=np.int32) if order is None else order.tokens)
    return places if places.ndim == 2 else places[None, :]


def positions_of(
    tokens: TokenInputs, context: LayerContext, execution: ExecutionConfig, length: int
) -> Int[Array, "#B S"]:
    """Return the positions of the tokens, their places in the row where none are set.

    Args:
        tokens: Positions, and the order of the row.
        context: Model-wide numbers.
        execution: Form and layout rules.
        length: Positions of a row.
    """
    where = tokens.positions
    if where is None and tokens.order is not None:
        where = tokens.order.by_row
    if where is not None:
        return execution.placement.place(where, (ax.ACT_BATCH, ax.ACT_SEQ_INNER))
    return places_of(current_order(context, execution, length), length)


def token_numbers(
    row_ids: Int[Array, " B"], order: TokenOrder | None, length: int
) -> Int[Array, "B S"]:
    """Return the number of each token in the batch of a step: the context `index` of routers.

    Args:
        row_ids: Number of each row in the batch of the step.
        order: Order of the tokens in a row; None is their own.
        length: Tokens of a row.
    """
    return row_ids[:, None] * jnp.int32(length) + places_of(order, length)


def _permute(arrays: Any, axes: Any, order: Any, execution: ExecutionConfig) -> Any:
    """Return `x[:, order]` of every array of a tree, on whole rows."""
    by_row = {} if isinstance(order, np.ndarray) else {"order": order}

    def run(arrays: Any, by_row: dict[str, Array], *, batch_axes: tuple[str, ...]) -> Any:
        del batch_axes
        return jax.tree.map(lambda x: in_order(x, by_row.get("order", order)), arrays)

    axes_by_name = dict.fromkeys(by_row, (ax.ACT_BATCH, None))
    region = execution.placement.region(run, in_axes=(axes, axes_by_name), out_axes=axes)
    return region(arrays, by_row)
