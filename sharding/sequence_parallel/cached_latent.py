# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a cache of latents: one vector per token, the key and value of all heads.

    key of slot u     c_u                     [latent, rotary key]
    value of slot u   the first R features of c_u

All heads share the entries, so every device of the tensor axis holds them for its own heads; slots
are split over `seq` and results merged as in `sharding/sequence_parallel/cached.py`. The value is a
view of the key and is not stored twice.
Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cached import attend_and_merge, write_slots
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens, Seen


class LatentSlots(NamedTuple):
    """Cached latents of one layer, a slot per position."""

    entries: Float[Array, "B U 1 H"]
    length: Int[Array, "*B"]
    """Filled slots, of all rows or of each."""


LATENT_CACHE_AXES = (ax.ACT_BATCH, ax.ACT_CACHE, None, None)
"""Logical axes of the entries."""


def attend_latent(
    q: Float[Array, "B S N H"],
    new: Float[Array, "B S H"],
    cache: LatentSlots,
    *,
    latent_dim: int,
    placement: Placement,
    positions: Int[Array, "B S"],
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen, LatentSlots]:
    """Write the entries of new tokens into the cache and attend to all of it.

    Args:
        q: Queries of the new tokens, as wide as an entry.
        new: Entries of the new tokens.
        cache: Cache with slots for all tokens to come.
        latent_dim: R, features of an entry that are its value.
        placement: Layout rules.
        positions: Positions of the new tokens; a token's slot is its position.
        rules: Mask and kernel; the scale must be set.

    Returns:
        The weighted mean of the values, the watched logits (see `attend`), and the cache with the
        new tokens.
    """
    heads = (ax.ACT_BATCH, None, ax.ACT_HEADS, None)
    axes = placement.mesh_axes(ax.ACT_CACHE)
    slots: Any = jax.tree.map(lambda part: LATENT_CACHE_AXES[: part.ndim], cache)
    seen = ("lse", "top") if rules.is_observed else ()

    def run(q, new, cache, positions, *, batch_axes):
        del batch_axes
        first = jnp.int32(0)
        if axes:
            first = jax.lax.axis_index(axes).astype(jnp.int32) * jnp.int32(cache.entries.shape[1])
        entries = write_slots(cache.entries, new, cache.length - first, is_cut=bool(axes))
        cache = LatentSlots(entries, cache.length + jnp.int32(new.shape[1]))
        held = jnp.arange(entries.shape[1], dtype=jnp.int32) + first
        keys = entries.astype(q.dtype)
        given = HeldTokens(positions, None), HeldTokens(held, None)
        out, found = attend_and_merge(q, keys, keys[..., :latent_dim], *given, rules, axes)
        return out, found, cache

    island = placement.island(
        run,
        in_axes=(heads, (ax.ACT_BATCH, None, None, None), slots, (ax.ACT_BATCH, None)),
        out_axes=(heads, dict.fromkeys(seen, (ax.ACT_BATCH, ax.ACT_HEADS, None)), slots),
    )
    return island(q, new[:, :, None], cache, positions)
