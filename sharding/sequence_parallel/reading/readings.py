# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the readings of a cache by generated tokens, and the reading of all of it.

To add a reading: a config that extends `CacheReading`, its row under `cache_reading` in
`jaxmoe/catalog/executions.py`, and its name in tests/test_architecture.py.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Final

from jaxtyping import Array, Float

from sharding.constrain import Placement
from sharding.sequence_parallel.cached import KVCache, NewTokens
from sharding.sequence_parallel.local_attention import AttentionRules, Seen


class CacheReading(abc.ABC):
    """Part of a cache that a generated token attends to; a selection changes what is generated."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""
    selects: ClassVar[bool]
    """Whether a part of the cache may be left out."""

    @abc.abstractmethod
    def num_slots(self, length: int, shards: int) -> int:
        """Return the slots of a cache, as many on every device.

        Args:
            length: Positions that it holds at least.
            shards: Devices that share a sequence's cache.
        """

    @abc.abstractmethod
    def check(self, name: str, *, can_select: bool) -> None:
        """Refuse a mixer whose cache cannot be read so.

        Args:
            name: Name of the mixer.
            can_select: Whether its cache has pages.

        Raises:
            ValueError: It cannot.
        """

    @abc.abstractmethod
    def describe(self, slots: int) -> str:
        """Return the part that a token reads as text.

        Args:
            slots: Slots of the cache.
        """

    @abc.abstractmethod
    def bytes_read(
        self, slots: int, *, bytes_per_token: int, num_layers: int, key_features: int
    ) -> int:
        """Return the bytes of a stack's cache that one generated token of one sequence reads.

        Args:
            slots: Slots of a sequence, from `num_slots`.
            bytes_per_token: Bytes of one token in all layers.
            num_layers: Layers of the stack.
            key_features: Features of the keys of a token in one layer.
        """

    @abc.abstractmethod
    def initial(self, entries: KVCache, placement: Placement) -> Any:
        """Return an empty cache.

        Args:
            entries: Empty keys and values.
            placement: Layout rules.
        """

    @abc.abstractmethod
    def attend(
        self,
        new: NewTokens,
        cache: Any,
        *,
        placement: Placement,
        rules: AttentionRules,
    ) -> tuple[Float[Array, "B S N H"], Seen, Any]:
        """Write new keys and values, and attend to what is read of the cache.

        Args:
            new: Tokens to write and to attend with.
            cache: Cache with slots for all tokens to come, or pages of a server.
            placement: Layout rules.
            rules: Mask and kernel.

        Returns:
            The output, the watched logits (see `attend`), and the cache with the new tokens.
        """


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WholeCacheConfig(CacheReading):
    """Attention of generated tokens to all earlier ones."""

    name: ClassVar[str] = "whole"
    selects: ClassVar[bool] = False

    def num_slots(self, length: int, shards: int) -> int:
        """Return the positions, as many on every device."""
        return -(-length // shards) * shards

    def check(self, name: str, *, can_select: bool) -> None:
        """Accept every mixer."""

    def describe(self, slots: int) -> str:
        """Return the number of slots as text."""
        return f"{self.name} slots={slots}"

    def bytes_read(
        self, slots: int, *, bytes_per_token: int, num_layers: int, key_features: int
    ) -> int:
        """Return the bytes of all slots of a sequence."""
        del num_layers, key_features
        return slots * bytes_per_token

    def initial(self, entries: KVCache, placement: Placement) -> KVCache:
        """Return the empty keys and values."""
        del placement
        return entries

    def attend(
        self,
        new: NewTokens,
        cache: Any,
        *,
        placement: Placement,
        rules: AttentionRules,
    ) -> tuple[Float[Array, "B S N H"], Seen, Any]:
        """Write new keys and values and attend to all; see `KVCache.attend`."""
        return cache.attend(new._replace(token_mask=None), placement=placement, rules=rules)


WHOLE_CACHE: Final = WholeCacheConfig()
"""The usual reading: all of the cache."""
