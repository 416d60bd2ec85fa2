# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies functions of whole matrices to stacks whose matrices are sharded.

A parameter is a stack of matrices (layers, experts), sharded in three ways: over its batch
dimensions (B devices), through its matrices (A devices), and not at all (C devices hold copies). A
function of whole matrices, such as Newton-Schulz, needs the second kind gathered. With g
matrices of m x n on a batch shard and b bytes per value, each device

    spread    computes s = ceil(g / AC) whole matrices, none of them twice. It sends
              s m n b (1 - 1/A) bytes in an all-to-all there and as many in one back, and receives
              s m n b (C - 1) in an all-gather that completes the copies.
    gathered  computes all g, as A C devices do. It receives g m n b (1 - 1/A) bytes in an
              all-gather, and returns nothing.

A stack that does not divide is padded with zero matrices, for which the function must give zeros.
"gathered" saves the way back where there are few small matrices; it computes up to A C times as
much. Gathering the batch dimensions as well would cost B times more of both and is not offered.

Without a mesh, and on a user's Auto mesh, this is a plain call, laid out by XLA. So it is inside a
user's shard_map, where the sharding of arrays is unknown: the matrices there must be whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.constrain import manual_axes, surroundings

MatrixLayout = Literal["spread", "gathered"]
Dims = tuple[int, ...]
MeshAxes = tuple[str, ...]


def map_matrices(
    function: Callable[[Array], Array],
    x: Float[Array, "*dims"],
    *,
    inputs: Dims,
    outputs: Dims,
    layout: MatrixLayout = "spread",
) -> Float[Array, "*dims"]:
    """Return `function` of every matrix of a stack, each of them whole.

    Args:
        function: Function from [... m n] to [... m n], matrix by matrix; zeros give zeros.
        x: Stack of matrices; dimensions that are neither `inputs` nor `outputs` count them.
        inputs: Dimensions of x, from 0, that are the rows of the matrix.
        outputs: Dimensions that are its columns.
        layout: Division of the work on an Explicit mesh; see the module.

    Returns:
        Array in the shape and layout of x.
    """
    batch = tuple(d for d in range(x.ndim) if d not in inputs + outputs)
    order = batch + inputs + outputs
    back = tuple(order.index(d) for d in range(x.ndim))
    matrix = tuple(math.prod(x.shape[d] for d in dims) for dims in (inputs, outputs))

    def on_whole(stack: Array, num_batch: int) -> Array:
        flat = stack.reshape(*stack.shape[:num_batch], *matrix)
        return function(flat).reshape(stack.shape)

    if surroundings() != "explicit":
        return on_whole(x.transpose(order), len(batch)).transpose(back)

    mesh = jax.sharding.get_abstract_mesh()
    spec = jax.typeof(x).sharding.spec
    cut = [tuple(a for a in _names(spec[d]) if mesh.shape[a] > 1) for d in range(x.ndim)]
    cut_axes = {axis for axes in cut for axis in axes}
    # Places of a Manual axis, such as the workers of a region, hold other matrices.
    busy = cut_axes.union(manual_axes())
    idle = tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in busy)
    cuts = [(i, cut[d]) for i, d in enumerate(inputs + outputs, 1) if cut[d]]

    def body(local: Array) -> Array:
        ordered = local.transpose(order)
        stack = ordered.reshape(-1, *ordered.shape[len(batch) :])  # [g, pieces of a matrix]
        through = _spread if layout == "spread" else _gather
        return through(on_whole, stack, cuts, idle).reshape(ordered.shape).transpose(back)

    # Not checked: an all-gather over the copies makes them equal, which its type does not show.
    return jax.shard_map(body, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _spread(
    on_whole: Callable[[Array, int], Array],
    stack: Array,
    cuts: list[tuple[int, MeshAxes]],
    idle: MeshAxes,
) -> Array:
    size = stack.shape[0]
    parts = math.prod(jax.lax.axis_size(axes) for axes in (*(axes for _, axes in cuts), idle))
    padding = [(0, -size % parts)] + [(0, 0)] * (stack.ndim - 1)
    stack = jnp.pad(stack, padding)
    if idle:
        share = stack.shape[0] // jax.lax.axis_size(idle)
        stack = jax.lax.dynamic_slice_in_dim(stack, jax.lax.axis_index(idle) * share, share)
    for dim, axes in cuts:
        stack = jax.lax.all_to_all(stack, axes, split_axis=0, concat_axis=dim, tiled=True)
    stack = on_whole(stack, 1)
    for dim, axes in reversed(cuts):
        stack = jax.lax.all_to_all(stack, axes, split_axis=dim, concat_axis=0, tiled=True)
    if idle:
        stack = jax.lax.all_gather(stack, idle, axis=0, tiled=True)
    return stack[:size]


def _gather(
    on_whole: Callable[[Array, int], Array],
    stack: Array,
    cuts: list[tuple[int, MeshAxes]],
    idle: MeshAxes,
) -> Array:
    del idle
    pieces = stack.shape
    for dim, axes in cuts:
        stack = jax.lax.all_gather(stack, axes, axis=dim, tiled=True)
    stack = on_whole(stack, 1)
    for dim, axes in cuts:
        first = jax.lax.axis_index(axes) * pieces[dim]
        stack = jax.lax.dynamic_slice_in_dim(stack, first, pieces[dim], axis=dim)
    return stack


def _names(entry: str | tuple[str, ...] | None) -> MeshAxes:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry
