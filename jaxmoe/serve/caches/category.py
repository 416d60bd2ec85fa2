# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Least recently used, with lifetime and quota of each category, and none for those not worth it.

Source: the category-aware semantic cache (arXiv:2510.26835): categories differ in how long an
answer stays true and in how often a query repeats. A category is worth a search if its hit rate
exceeds the cost of the search over what a hit saves. Similarity of queries is decided before: equal
items are hits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.serve.caches.base import Item, ItemCache, ItemCacheConfig, Use
from jaxmoe.serve.caches.lru import LRU


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CategoryConfig(ItemCacheConfig):
    """Lifetime and quota by category."""

    name: ClassVar[str] = "category"
    is_live: ClassVar[bool] = False

    lifetime: float = float("inf")
    """Seconds after which a stored item is not used."""
    quota: float = 1.0
    """Share of the cache that one category may fill."""
    search_cost: float = 0.0
    """Cost of looking for an item."""
    saved: float = 1.0
    """What a hit saves, in the same unit."""
    trial: int = 100
    """Uses of a category before it is judged."""

    def __post_init__(self) -> None:
        if not self.lifetime > 0 or not 0 < self.quota <= 1 or not self.saved > 0:
            raise ValueError(
                f"lifetime={self.lifetime} and saved={self.saved} must be positive,"
                f" quota={self.quota} lie in (0, 1]"
            )

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        return _Category(self, {use.item: use.category for use in trace})


class _Category(LRU):
    def __init__(self, config: CategoryConfig, categories: dict[Item, str]):
        super().__init__()
        self._config, self._categories = config, categories
        self._stored: dict[Item, float] = {}
        self._counts: dict[str, tuple[int, int]] = {}

    def used(self, number: int, use: Use, *, is_hit: bool) -> None:
        super().used(number, use, is_hit=is_hit)
        uses, hits = self._counts.get(use.category, (0, 0))
        self._counts[use.category] = (uses + 1, hits + is_hit)
        if not is_hit:
            self._stored[use.item] = use.time

    def is_valid(self, use: Use) -> bool:
        return use.time - self._stored[use.item] < self._config.lifetime

    def stores(self, number: int, use: Use, held: Mapping[Item, float], capacity: float) -> bool:
        uses, hits = self._counts.get(use.category, (0, 0))
        break_even = self._config.search_cost / self._config.saved
        if uses >= self._config.trial and hits < break_even * uses:
            return False
        own = sum(s for i, s in held.items() if self._categories[i] == use.category)
        return own + use.size <= self._config.quota * capacity
