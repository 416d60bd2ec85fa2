# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache of keys and values whose slots may be sharded.

    rank r of N holds the slots r U/N to (r + 1) U/N - 1
    every rank attends with all new queries to its own slots       (out_r, lse_r)
    out = sum_r exp(lse_r - top) out_r / sum_r exp(lse_r - top)    top: the largest lse_r

One all-reduce of the largest lse and one of the sums move S N (H + 2) values per sequence, whatever
its length. An empty slot counts as a future position, with weight 0. Every rank has the new keys
and values, and each slot is written by the rank that holds it. Slots may be quantised
(`sharding/sequence_parallel/cache_formats.py`): new keys and values are rounded as they are
written, and attention reads the rounded ones at once. Flash-decoding splits keys in the same way
within one device.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import QuantizedArray
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cache_formats import into_cache, out_of_cache
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    Seen,
    attend_locally,
    attend_part,
)


class CacheSlots(NamedTuple):
    """Cached keys and values of one layer, a slot per position."""

    k: Float[Array, "B U M H"] | QuantizedArray
    v: Float[Array, "B U M H"] | QuantizedArray
    length: Int[Array, "*B"]
    """Filled slots, of all rows or of each."""


CACHE_AXES = (ax.ACT_BATCH, ax.ACT_CACHE, ax.ACT_KV_HEADS, None)
"""Logical axes of the keys and values."""


def attend_cached(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M H"],
    cache: CacheSlots,
    *,
    placement: Placement,
    positions: Int[Array, "B S"],
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N H"], Seen, CacheSlots]:
    """Write new keys and values into the cache and attend to all of it.

    Args:
        q: Queries of the new tokens.
        k: Keys of the new tokens.
        v: Values of the new tokens.
        cache: Cache with slots for all tokens to come.
        placement: Layout rules.
        positions: Positions of the new tokens; a token's slot is its position.
        rules: Mask and kernel.

    Returns:
        The output, the watched logits (see `attend`), and the cache with the new tokens.
    """
    heads, kv_heads = ((ax.ACT_BATCH, None, axis, None) for axis in (ax.ACT_HEADS, ax.ACT_KV_HEADS))
    axes = placement.mesh_axes(ax.ACT_CACHE)
    # Scales have as many dimensions as values.
    slots: Any = jax.tree.map(lambda part: CACHE_AXES[: part.ndim], cache)
    seen = ("lse", "top") if rules.is_observed else ()

    def run(q, k, v, cache, positions, *, batch_axes):
        del batch_axes
        first = jnp.int32(0)
        if axes:
            first = jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(cache.k.shape[1])

        def write(held: Any, new: Array) -> Any:
            put = functools.partial(write_slots, start=cache.length - first, is_cut=bool(axes))
            return jax.tree.map(put, held, into_cache(new, held))

        number = jnp.int32(k.shape[1])
        cache = CacheSlots(write(cache.k, k), write(cache.v, v), cache.length + number)
        held = jnp.arange(cache.k.shape[1], dtype=jnp.int32) + first
        keys, values = (out_of_cache(part, q.dtype) for part in (cache.k, cache.v))
        given = HeldTokens(positions, None), HeldTokens(held, None)
        out, found = attend_and_merge(q, keys, values, *given, rules, axes)
        return out, found, cache

    island = placement.island(
        run,
        in_axes=(heads, kv_heads, kv_heads, slots, (ax.ACT_BATCH, None)),
        out_axes=(heads, dict.fromkeys(seen, (ax.ACT_BATCH, ax.ACT_HEADS, None)), slots),
    )
    return island(q, k, v, cache, positions)


def write_slots(held: Array, new: Array, start: Array, *, is_cut: bool) -> Array:
    """Return the slots with the new entries from `start` on, which may be outside of them.

    Args:
        held: Slots of this device [B u M H]; or their scales.
        new: New entries [B S M H] in the same dtype.
        start: Slot of the first new entry, counted from the first that is held; of all rows, or of
            each [B].
        is_cut: Whether other devices hold other slots.
    """
    if start.ndim:

        def write_row(held: Array, new: Array, start: Array) -> Array:
            return write_slots(held[None], new[None], start, is_cut=is_cut)[0]

        return jax.vmap(write_row)(held, new, start)
    slots, number = held.shape[1], new.shape[1]
    if not is_cut:
        return jax.lax.dynamic_update_slice_in_dim(held, new, start, axis=1)
    if number == 1:  # touch one slot instead of all
        at = jnp.clip(start, 0, slots - 1)
        old = jax.lax.dynamic_slice_in_dim(held, at, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(
            held, jnp.where(at == start, new, old), at, axis=1
        )
    index = jnp.arange(slots, dtype=jnp.int32) - start
    is_new = (index >= 0) & (index < number)
    rows = new.at[:, jnp.clip(index, 0, number - 1)].get(mode="clip")
    return jnp.where(is_new[None, :, None, None], rows, held)


def attend_and_merge(
    q: Array,
    k: Array,
    v: Array,
    queries: HeldTokens,
    keys: HeldTokens,
    rules: AttentionRules,
    axes: tuple[str, ...],
) -> tuple[Array, Seen]:
    """Return attention to the slots of all devices, merged over the mesh axes that split them."""
    if not axes:
        return attend_locally(q, k, v, queries, keys, rules)
    out, lse, highest = attend_part(q, k, v, queries, keys, rules)
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(lse - top)
    total = jax.lax.psum(weight, axes)
    by_query = weight.swapaxes(1, 2)[..., None]
    summed = jax.lax.psum(by_query * out.astype(jnp.float32), axes)
    divisor = jnp.where(total > 0.0, total, 1.0).swapaxes(1, 2)[..., None]
    merged = (summed / divisor).astype(q.dtype)
    if highest is None:
        return merged, {}
    return merged, {"lse": top + jnp.log(total), "top": jax.lax.pmax(highest, axes)}
