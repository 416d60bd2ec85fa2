# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evicts the item with the fewest uses so far, of equal ones the least recent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LFUConfig(ItemCacheConfig):
    """Least frequently used."""

    name: ClassVar[str] = "lfu"

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        del trace
        return _LFU()


class _LFU(ItemCache):
    def __init__(self) -> None:
        self._uses: dict[Item, tuple[int, int]] = {}

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        count, _ = self._uses.get(use.item, (0, 0))
        self._uses[use.item] = (count + 1, number)

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        return min(items, key=lambda item: self._uses[item])
