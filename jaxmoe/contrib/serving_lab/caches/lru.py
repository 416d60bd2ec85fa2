# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evicts the item that was not used for the longest time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LRUConfig(ItemCacheConfig):
    """Least recently used."""

    name: ClassVar[str] = "lru"

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        del trace
        return LRU()


class LRU(ItemCache):
    """Order of the last uses."""

    def __init__(self) -> None:
        self.last: dict[Item, int] = {}
        """Place of the last use of each item."""

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        """Take note of a use."""
        self.last[use.item] = number

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        """Return the item that was not used for the longest time."""
        return min(items, key=lambda item: self.last[item])
