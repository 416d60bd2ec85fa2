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

from jaxmoe.routing.base import Extent

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


def _order(values: Float[Array, "*d"]) -> Array:
    """Map f32 to positive integers of the same order."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def _find_unordered(keys: Array) -> Float[Array, "*d"]:
    top = jnp.uint32(1 << 31)
    bits = jnp.where(keys >= top, keys & ~top, ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
