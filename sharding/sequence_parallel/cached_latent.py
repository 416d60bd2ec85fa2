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

from jaxtyping import Array, Float, Int

from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cached import (
    attend_and_merge,
    held_positions,
    layer_of,
    write_slots,
)
from sharding.sequence_parallel.local_attention import AttentionRules, HeldTokens, Seen
from sharding.sequence_parallel.paged_latent import PagedLatents

LATENT_CACHE_AXES = (None, ax.ACT_BATCH, ax.ACT_CACHE, None, None)
"""Logical axes of the entries."""


def attend_latent(
    q: Float[Array, "B S N H"],
    new: Float[Array, "B S H"],
    entries: Float[Array, "L B U 1 H"] | PagedLatents,
    layer: Int[Array, ""],
    *,
    latent_dim: int,
    placement: Placement,
    positions: Int[Array, "B S"],
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen, Float[Array, "L B U 1 H"] | PagedLatents]:
    """Write the entries of new tokens into the cache and attend to all of it.

    Args:
        q: Queries of the new tokens, as wide as an entry.
        new: Entries of the new tokens.
        entries: Cache of a stack of layers, with slots for all tokens to come; or pages.
        layer: Layer of the cache that is written and read.
        latent_dim: R, features of an entry that are its value.
        placement: Layout rules.
        positions: Positions of the new tokens; a token's slot is its position.
        rules: Mask and kernel; the scale must be set.

    Returns:
        The weighted mean of the values, the watched logits (see `attend`), and the cache with the
        new tokens.
    """
    if isinstance(entries, PagedLatents):
        options = {"placement": placement, "positions": positions, "rules": rules}
        return entries.attend(q, new, layer, latent_dim=latent_dim, **options)
    heads = (ax.ACT_BATCH, None, ax.ACT_HEADS, None)
    axes = placement.mesh_axes(ax.ACT_CACHE)
    seen = ("lse", "top") if rules.is_observed else ()

    def run(q, new, entries, layer, positions, *, batch_axes):
        del batch_axes
        key_positions = held_positions(entries.shape[2], axes)
        entries = write_slots(
            entries, new.astype(entries.dtype), layer, positions - key_positions[0]
        )
        keys = layer_of(entries, layer).astype(q.dtype)
        options = HeldTokens(positions, None), HeldTokens(key_positions, None)
        out, statistics = attend_and_merge(q, keys, keys[..., :latent_dim], *options, rules, axes)
        return out, statistics, entries

    region = placement.region(
        run,
        in_axes=(
            heads,
            (ax.ACT_BATCH, None, None, None),
            LATENT_CACHE_AXES,
            (),
            (ax.ACT_BATCH, None),
        ),
        out_axes=(
            heads,
            dict.fromkeys(seen, (ax.ACT_BATCH, ax.ACT_HEADS, None)),
            LATENT_CACHE_AXES,
        ),
    )
    return region(q, new[:, :, None], entries, layer, positions)
