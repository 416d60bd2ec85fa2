# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Evicts the item whose next use is farthest away: the bound for items of equal size.

Source: Belady, IBM Systems Journal 5 (1966). An item that is used later than all in a full cache is
not stored. No policy loads fewer items of equal size.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BeladyConfig(ItemCacheConfig):
    """Farthest next use; knows the future."""

    name: ClassVar[str] = "belady"
    is_live: ClassVar[bool] = False

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        return _Belady(trace)


class _Belady(ItemCache):
    def __init__(self, trace: Sequence[Use]):
        self._places: dict[Item, list[int]] = {}
        for number, use in enumerate(trace):
            self._places.setdefault(use.item, []).append(number)

    def admit(
        self, number: int, use: Use, items: Mapping[Item, float], capacity: float
    ) -> Sequence[Item] | None:
        if sum(items.values()) + use.size <= capacity or not items:
            return ()
        farthest = max(self._following(number, item) for item in items)
        return () if self._following(number, use.item) < farthest else None

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        return max(items, key=lambda item: self._following(number, item))

    def _following(self, number: int, item: Item) -> float:
        """Return the place of the next use of an item."""
        places = self._places[item]
        place = bisect.bisect_right(places, number)
        return places[place] if place < len(places) else float("inf")
