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

from jaxtyping import Array, Float

from sharding import axes as ax
from sharding.constrain import Placement
from sharding.sequence_parallel.cached import (
    NewTokens,
    attend_and_merge,
    attend_in_region,
    held_positions,
    layer_of,
    write_slots,
)
from sharding.sequence_parallel.local_attention import (
    AttentionRules,
    HeldTokens,
    LocalAttention,
    Seen,
)
from sharding.sequence_parallel.paged_latent import PagedLatents

LATENT_CACHE_AXES = (None, ax.ACT_BATCH, ax.ACT_CACHE, None, None)
"""Logical axes of the entries."""


def attend_latent(
    new: NewTokens,
    entries: Float[Array, "L B U 1 H"] | PagedLatents,
    *,
    latent_dim: int,
    placement: Placement,
    rules: AttentionRules,
) -> tuple[Float[Array, "B S N Hv"], Seen, Float[Array, "L B U 1 H"] | PagedLatents]:
    """Write the entries of new tokens into the cache and attend to all of it.

    Args:
        new: Tokens to write and to attend with: queries as wide as an entry, entries as keys.
        entries: Cache of a stack of layers, with slots for all tokens to come; or pages.
        latent_dim: R, features of an entry that are its value.
        placement: Layout rules.
        rules: Mask and kernel; the scale must be set.

    Returns:
        The weighted mean of the values, the watched logits (see `attend`), and the cache with the
        new tokens.
    """
    if isinstance(entries, PagedLatents):
        return entries.attend(new, latent_dim=latent_dim, placement=placement, rules=rules)
    axes = placement.mesh_axes(ax.ACT_CACHE)

    def run(new, entries, *, batch_axes):
        del batch_axes
        key_positions = held_positions(entries.shape[2], axes)
        slots = new.positions - key_positions[0]
        entries = write_slots(entries, new.k.astype(entries.dtype), new.layer, slots)
        keys = layer_of(entries, new.layer).astype(new.q.dtype)
        token_pair = HeldTokens(new.positions, None), HeldTokens(key_positions, None)
        out, statistics = attend_and_merge(
            LocalAttention(new.q, keys, keys[..., :latent_dim], *token_pair, rules), axes
        )
        return out, statistics, entries

    return attend_in_region(run, new, entries, LATENT_CACHE_AXES, placement=placement, rules=rules)
