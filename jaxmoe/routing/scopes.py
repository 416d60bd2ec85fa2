# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scopes: sets of tokens over which a rule that depends on several tokens is solved.

    sequence   each sequence separately; collectives over the axes that spread its positions
    batch      all sequences of a micro-batch; collectives also over the axes that spread the batch

The default everywhere is `sequence`: the result then depends neither on the mesh nor on the number
of micro-batches. The mesh axes of a region of shard_map are those of `RouterInputs.extent`.

`kth_largest` is exact and the same on every mesh: it determines the value bit by bit, with one psum
of E counts per bit (32 in total).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import Extent, RouterInputs
from jaxmoe.routing.routers.noise import token_index

Scope = Literal["sequence", "batch"]


def scope_axes(extent: Extent, scope: Scope) -> tuple[str, ...]:
    """Return the mesh axes over which a scope is spread, for collectives."""
    return extent.sequence_axes + (extent.batch_axes if scope == "batch" else ())


def split_scopes(values: Array, extent: Extent, scope: Scope) -> Array:
    """Reshape [T ...] to [G T/G ...]: the tokens on this device, grouped by scope.

    Args:
        values: One entry per token of whole, consecutive sequences.
        extent: Layout of these tokens.
        scope: Tokens of a group.
    """
    length = values.shape[0]
    if scope == "sequence" and extent.sequence_length is not None:
        length = extent.sequence_length
    groups = values.shape[0] // length if length else 1
    return values.reshape(groups, length, *values.shape[1:])


def join_scopes(values: Array) -> Array:
    """Invert `split_scopes`."""
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def total(values: Array, axes: tuple[str, ...]) -> Array:
    """Sum over mesh axes; without axes return the values unchanged."""
    return jax.lax.psum(values, axes) if axes else values


def is_first(axes: tuple[str, ...]) -> Float[Array, ""]:
    """Return 1 on the first device along the mesh axes and 0 on the others; 1 without axes.

    A value that is the same on all devices, multiplied by this, enters a sum over devices once.
    """
    return jnp.float32(1.0) if not axes else (jax.lax.axis_index(axes) == 0).astype(jnp.float32)


def kth_largest(
    values: Float[Array, "G n E"],
    k: Int[Array, " G"],
    mask: Bool[Array, "G n"],
    axes: tuple[str, ...] = (),
) -> Float[Array, "G E"]:
    """Return the k-th largest of each column over the unmasked rows of all devices; no gradient.

    Args:
        values: Rows on this device, f32, not NaN.
        k: Rank from 1.
        mask: False excludes a row.
        axes: Mesh axes over which the rows of a group are spread.

    Returns:
        Values; -inf where there are fewer than k rows.
    """
    keys = jnp.where(mask[:, :, None], _order(jax.lax.stop_gradient(values)), jnp.uint32(0))

    def bit(i: Array, bits: Array) -> Array:
        tried = bits | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        is_above = keys >= tried[:, None, :]
        count = total(is_above.sum(1, dtype=jnp.int32), axes)
        return jnp.where(count >= k[:, None], tried, bits)

    # The initial value must vary over the same mesh axes as k and the sums.
    start = jnp.zeros((values.shape[0], values.shape[2]), jnp.uint32)
    start = start | (total(keys.sum(1, dtype=jnp.uint32), axes) & jnp.uint32(0))
    start = start | (k[:, None].astype(jnp.uint32) & jnp.uint32(0))
    bits = jax.lax.fori_loop(0, 32, bit, start)
    return jnp.where(bits == 0, -jnp.inf, _find_unordered(bits))


def choose_largest(
    values: Float[Array, "G n E"],
    k: Int[Array, " G"],
    mask: Bool[Array, "G n"],
    order: Int[Array, "G n"],
    axes: tuple[str, ...] = (),
) -> Bool[Array, "G n E"]:
    """Return which rows are among the k largest of each column over all devices; no gradient.

    Args:
        values: Values of the rows on this device.
        k: Number of rows, at most the unmasked rows of the group.
        mask: False excludes a row.
        order: Distinct numbers, at least 0, of the rows of a group; ties go to the lowest.
        axes: Mesh axes over which the rows of a group are spread.
    """
    groups, length, experts = values.shape
    least = kth_largest(values, k, mask, axes)[:, None, :]
    is_above = (values > least) & mask[:, :, None]
    is_equal = (values == least) & mask[:, :, None]
    missing = k[:, None] - total(is_above.sum(1, dtype=jnp.int32), axes)
    # Earlier is larger; integers are mapped to the bits of normal f32 numbers, which keeps them
    # distinct.
    early = jax.lax.bitcast_convert_type(jnp.int32(0x7F000000) - order, jnp.float32)
    by_column = jnp.broadcast_to(early[:, None, :], (groups, experts, length))
    last = kth_largest(
        by_column.reshape(groups * experts, length, 1),
        missing.reshape(-1),
        is_equal.swapaxes(1, 2).reshape(groups * experts, length),
        axes,
    ).reshape(groups, 1, experts)
    is_wanted = (missing[:, None, :] > 0) & (early[:, :, None] >= last)
    return is_above | (is_equal & is_wanted)


def token_order(inputs: RouterInputs, scope: Scope) -> Int[Array, "G n"]:
    """Return the number of each token in the batch; if not given, numbered device after device."""
    index = token_index(inputs)
    if "index" not in inputs.context:
        device = jnp.int32(0)
        for axis in scope_axes(inputs.extent, scope):
            device = device * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)
        index = index + device * index.shape[0]
    return split_scopes(index, inputs.extent, scope)


def _order(values: Float[Array, "*d"]) -> Array:
    """Map f32 to positive integers of the same order."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def _find_unordered(keys: Array) -> Float[Array, "*d"]:
    top = jnp.uint32(1 << 31)
    bits = jnp.where(keys >= top, keys & ~top, ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
