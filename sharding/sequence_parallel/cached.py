# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache of keys and values whose slots may be sharded.

    rank r of N holds the slots r U/N to (r + 1) U/N - 1
    every rank attends with all new queries to its own slots       (out_r, lse_r)
    out = sum_r exp(lse_r - top) out_r / sum_r exp(lse_r - top)    top: the largest lse_r

One all-reduce of the largest lse and one of the sums move S N (H + 2) values per sequence, whatever
its length. The slot of a token is its position, so an empty slot is a future position and has
weight 0. Every rank has the new keys and values, and each slot is written by the rank that holds
it. Slots may be quantised (`sharding/sequence_parallel/cache_formats.py`): new keys and values are
rounded as they are written, and attention reads the rounded ones at once. Flash-decoding splits
keys in the same way within one device.

A cache is stacked over layers, and a layer writes its part of the whole stack: a stack that is
carried through a loop over layers is written in place, while one that is sliced by the loop would
be copied by each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import QuantizedArray
from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cache_formats import into_cache, out_of_cache
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    LocalAttention,
    Seen,
    attend_locally,
    attend_part,
)


class NewTokens(NamedTuple):
    """Tokens that a layer takes into its cache and attends with."""

    q: Float[Array, "B S N H"]
    """Queries."""
    k: Float[Array, "B S M H"]
    """Keys; of latents their entries [B S 1 H]."""
    v: Float[Array, "B S M H"] | None
    """Values; None for latents, whose entries hold them."""
    layer: Int[Array, ""]
    """Layer of the cache that is written and read."""
    positions: Int[Array, "B S"]
    """Positions: a token's slot in a cache with a slot per position. In pages -1 is padding."""
    token_mask: Bool[Array, "B S"] | None = None
    """False for padding; None where the cache does not ask for it."""

    def axes(self) -> Any:
        """Return the logical axes of each array, in the same record."""
        heads, kv_heads = (
            (ax.ACT_BATCH, None, axis, None) for axis in (ax.ACT_HEADS, ax.ACT_KV_HEADS)
        )
        rows = (ax.ACT_BATCH, None)
        axes: dict[str, Any] = {"q": heads, "layer": (), "positions": rows}
        axes["k"] = (ax.ACT_BATCH, None, None, None) if self.v is None else kv_heads
        axes["v"] = None if self.v is None else kv_heads
        axes["token_mask"] = None if self.token_mask is None else rows
        return NewTokens(**axes)


class KVCache(NamedTuple):
    """Cached keys and values of a stack of layers, a slot per position."""

    k: Float[Array, "L B U M H"] | QuantizedArray
    v: Float[Array, "L B U M H"] | QuantizedArray

    def attend(
        self, new: NewTokens, *, placement: Placement, rules: AttentionRules
    ) -> tuple[Float[Array, "B S N H"], Seen, KVCache]:
        """Write new keys and values and attend to all entries of a layer.

        Args:
            new: Tokens to write and to attend with.
            placement: Layout rules.
            rules: Mask and kernel.

        Returns:
            The output, the watched logits (see `attend`), and the cache with the new tokens.
        """
        axes = placement.mesh_axes(ax.ACT_CACHE)
        # Scales have as many dimensions as values.
        slots: Any = jax.tree.map(lambda _: CACHE_AXES, self)

        def run(new, cache, *, batch_axes):
            del batch_axes
            key_positions = held_positions(cache.k.shape[2], axes)
            slots = new.positions - key_positions[0]
            cache = write_tokens(cache, new.k, new.v, new.layer, slots)
            keys, values = (out_of_cache(layer_of(part, new.layer), new.q.dtype) for part in cache)
            rows = new.q.shape[0]
            token_pair = (
                HeldTokens.at(new.positions, rows, rules),
                HeldTokens.at(key_positions, rows, rules),
            )
            out, seen = attend_and_merge(
                LocalAttention(new.q, keys, values, *token_pair, rules), axes
            )
            return out, seen, cache

        return attend_in_region(run, new, self, slots, placement=placement, rules=rules)


def attend_in_region(
    run: Callable[..., Any],
    new: NewTokens,
    cache: Any,
    cache_axes: Any,
    *,
    placement: Placement,
    rules: AttentionRules,
) -> Any:
    """Return the output, the watched logits and the cache of a function of local shards.

    Args:
        run: Function of the local tokens and the local cache.
        new: Tokens to write and to attend with.
        cache: Cache of a stack of layers.
        cache_axes: Logical axes of its arrays.
        placement: Layout rules.
        rules: Mask and kernel.
    """
    axes = new.axes()
    seen = dict.fromkeys(rules.seen, (ax.ACT_BATCH, ax.ACT_HEADS, None))
    region = placement.region(run, in_axes=(axes, cache_axes), out_axes=(axes.q, seen, cache_axes))
    return region(new, cache)


CACHE_AXES = (None, ax.ACT_BATCH, ax.ACT_CACHE, ax.ACT_KV_HEADS, None)
"""Logical axes of the keys and values."""


def write_tokens(
    cache: KVCache, k: Array, v: Array, layer: Int[Array, ""], slots: Int[Array, "B S"]
) -> KVCache:
    """Return the cache with new keys and values of one layer, rounded as the cache is.

    Args:
        cache: Slots of this device.
        k: Keys of the new tokens [B S M H].
        v: Values of the new tokens.
        layer: Layer that they are of.
        slots: Slot of each token, as for `write_slots`.
    """

    def write(entries: Any, new: Array) -> Any:
        def put(held_entries: Array, new: Array) -> Array:
            return write_slots(held_entries, new, layer, slots)

        return jax.tree.map(put, entries, into_cache(new, entries))

    return KVCache(write(cache.k, k), write(cache.v, v))


def held_positions(slots: int, axes: tuple[str, ...]) -> Int[Array, " u"]:
    """Return the positions whose entries this device holds.

    Args:
        slots: Number of them.
        axes: Mesh axes over which slots are cut.
    """
    first = jnp.int32(0)
    if axes:
        first = jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(slots)
    return jnp.arange(slots, dtype=jnp.int32) + first


def layer_of(stacked: Any, layer: Int[Array, ""]) -> Any:
    """Return one layer's part of arrays stacked over layers."""
    return jax.tree.map(
        lambda part: jax.lax.dynamic_index_in_dim(part, layer, 0, keepdims=False), stacked
    )


def write_slots(
    entries: Array, new: Array, layer: Int[Array, ""], slots: Int[Array, "B S"]
) -> Array:
    """Return the entries of all layers with the new ones of one layer.

    Args:
        entries: Slots of this device [L B u M H]; or their scales.
        new: New entries [B S M H] in the same dtype.
        layer: Layer that they are of.
        slots: Slot of each entry, counted from the first that is held; those outside of the held
            ones are left out.
    """
    end = jnp.int32(entries.shape[2])
    slots = jnp.where(slots < 0, end, slots)  # a negative index would count from the end
    rows = jnp.arange(entries.shape[1], dtype=jnp.int32)[:, None]
    return entries.at[layer, rows, slots].set(new, mode="drop")


def attend_and_merge(attention: LocalAttention, axes: tuple[str, ...]) -> tuple[Array, Seen]:
    """Return attention to the slots of all devices, merged over the mesh axes that split them."""
    if not axes:
        return attend_locally(attention)
    out, lse, highest = attend_part(attention)
    top = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(lse - top)
    total = jax.lax.psum(weight, axes)
    by_query = weight.swapaxes(1, 2)[..., None]
    summed = jax.lax.psum(by_query * out.astype(jnp.float32), axes)
    divisor = jnp.where(total > 0.0, total, 1.0).swapaxes(1, 2)[..., None]
    merged = (summed / divisor).astype(attention.q.dtype)
    seen = {"lse": top + jnp.log(total)} if attention.rules.seen else {}
    return merged, seen if highest is None else seen | {"top": jax.lax.pmax(highest, axes)}
