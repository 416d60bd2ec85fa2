# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Scopes: the tokens over which a rule that looks at many tokens at once is solved.

    sequence   each sequence by itself; collectives only over the axes that spread its positions
    batch      all sequences of a micro-batch; collectives over the axes that spread the batch too

The default everywhere is `sequence`: neither the mesh nor the number of micro-batches then changes
the result. Inside an island the mesh axes are those of `RouterInputs.extent`.

`kth_largest` is exact and the same however the values are spread: it finds the number bit by bit,
and each bit costs one psum of E counts (32 in all).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.routing.base import Extent

Scope = Literal["sequence", "batch"]


def scope_axes(extent: Extent, scope: Scope) -> tuple[str, ...]:
    """Mesh axes over which one scope is spread: those of its collectives."""
    return extent.sequence_axes + (extent.batch_axes if scope == "batch" else ())


def split_scopes(values: Array, extent: Extent, scope: Scope) -> Array:
    """[T ...] as [G T/G ...]: the tokens held here, by scope.

    Args:
        values: one entry per token; whole sequences, one after the other.
        extent: of these tokens.
        scope: see the module.
    """
    length = values.shape[0]
    if scope == "sequence" and extent.sequence_length is not None:
        length = extent.sequence_length
    groups = values.shape[0] // length if length else 1
    return values.reshape(groups, length, *values.shape[1:])


def join_scopes(values: Array) -> Array:
    """The inverse of `split_scopes`."""
    return values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])


def total(values: Array, axes: tuple[str, ...]) -> Array:
    """The sum over mesh axes; the values themselves where there are none."""
    return jax.lax.psum(values, axes) if axes else values


def is_first(axes: tuple[str, ...]) -> Float[Array, ""]:
    """1 on the first device along these mesh axes, 0 on the others; 1 where there are none.

    What all devices of a scope have alike enters sums over devices once when multiplied by it.
    """
    return jnp.float32(1.0) if not axes else (jax.lax.axis_index(axes) == 0).astype(jnp.float32)


def kth_largest(
    values: Float[Array, "G n E"],
    k: Int[Array, " G"],
    mask: Bool[Array, "G n"],
    axes: tuple[str, ...] = (),
) -> Float[Array, "G E"]:
    """The k-th largest of each column among the unmasked rows of all devices; no gradient.

    Args:
        values: f32, not NaN; the rows held here.
        k: from 1.
        mask: False leaves a row out.
        axes: mesh axes over which the rows of a group are spread.

    Returns:
        -inf where there are fewer than k rows.
    """
    keys = jnp.where(mask[:, :, None], _ordered(jax.lax.stop_gradient(values)), jnp.uint32(0))

    def bit(i: Array, found: Array) -> Array:
        tried = found | (jnp.uint32(1) << (jnp.uint32(31) - i.astype(jnp.uint32)))
        is_above = keys >= tried[:, None, :]
        count = total(is_above.sum(1, dtype=jnp.int32), axes)
        return jnp.where(count >= k[:, None], tried, found)

    # The start is as varying over the mesh as the k, and as the sums are.
    start = jnp.zeros((values.shape[0], values.shape[2]), jnp.uint32)
    start = start | (total(keys.sum(1, dtype=jnp.uint32), axes) & jnp.uint32(0))
    start = start | (k[:, None].astype(jnp.uint32) & jnp.uint32(0))
    found = jax.lax.fori_loop(0, 32, bit, start)
    return jnp.where(found == 0, -jnp.inf, _unordered(found))


def _ordered(values: Float[Array, "*d"]) -> Array:
    """Integers in the order of the numbers; every number is above 0."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


def _unordered(keys: Array) -> Float[Array, "*d"]:
    top = jnp.uint32(1 << 31)
    bits = jnp.where(keys >= top, keys & ~top, ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
