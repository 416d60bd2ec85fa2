# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads a cache as a whole: the usual attention of generated tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float, Int

from sharding.constrain import Placement
from sharding.sequence_parallel.cached import KVCache
from sharding.sequence_parallel.local_attention import AttentionRules, Seen
from sharding.sequence_parallel.reading.page_selection import PageSelectionConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeCacheConfig:
    """Attention of generated tokens to all earlier ones."""

    name: ClassVar[str] = "whole"
    selects: ClassVar[bool] = False

    def with_kept(self, kept: int) -> PageSelectionConfig:
        """Return the selection of a number of pages."""
        return PageSelectionConfig(kept=kept)

    def num_slots(self, length: int, shards: int) -> int:
        """Return the slots of a cache, as many on every device.

        Args:
            length: Positions that it holds at least.
            shards: Devices that share a sequence's cache.
        """
        return -(-length // shards) * shards

    def check(self, name: str, *, can_select: bool) -> None:
        """Accept every mixer.

        Args:
            name: Name of the mixer.
            can_select: Whether its cache has pages.
        """

    def describe(self, slots: int) -> str:
        """Return the part that a token reads as text.

        Args:
            slots: Slots of the cache.
        """
        return f"{self.name} slots={slots}"

    def bytes_read(
        self, slots: int, *, bytes_per_token: int, num_layers: int, key_features: int
    ) -> int:
        """Return the bytes of a stack's cache that one generated token of one sequence reads.

        Args:
            slots: Slots of a sequence.
            bytes_per_token: Bytes of one token in all layers.
            num_layers: Layers of the stack.
            key_features: Features of the keys of a token in one layer.
        """
        del num_layers, key_features
        return slots * bytes_per_token

    def initial(self, entries: KVCache, placement: Placement) -> KVCache:
        """Return an empty cache.

        Args:
            entries: Empty keys and values.
            placement: Layout rules.
        """
        del placement
        return entries

    def attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S M H"],
        v: Float[Array, "B S M H"],
        cache: Any,
        layer: Int[Array, ""],
        *,
        placement: Placement,
        positions: Int[Array, "B S"],
        token_mask: Bool[Array, "B S"],
        rules: AttentionRules,
    ) -> tuple[Float[Array, "B S N H"], Seen, Any]:
        """Write new keys and values and attend to all; see `KVCache.attend`.

        Args:
            q: Queries of the new tokens.
            k: Keys of the new tokens.
            v: Values of the new tokens.
            cache: Cache with slots for all tokens to come, or pages of a server.
            layer: Layer of the cache that is written and read.
            placement: Layout rules.
            positions: Positions of the new tokens.
            token_mask: False for padding, whose slots are written again.
            rules: Mask and kernel.
        """
        del token_mask
        given = {"placement": placement, "positions": positions, "rules": rules}
        return cache.attend(q, k, v, layer, **given)
