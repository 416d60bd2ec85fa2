# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Least recently used, with lifetime and quota of each category, and none for those not worth it.

Source: the category-aware semantic cache (arXiv:2510.26835): categories differ in how long an
answer stays true and in how often a query repeats. A category that has filled its quota loses its
own least recently used items for new ones. A category is worth a search if its hit rate exceeds the
cost of the search over what a hit saves; one that was found not to be is not stored any more.
Similarity of queries is decided before: equal items are hits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use
from jaxmoe.contrib.serving_lab.caches.lru import LRU

_TERMS = ("lifetime", "quota", "search_cost", "saved", "trial")


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
    terms: tuple[str, ...] = ()
    """Fields of categories that have their own, as `chat:lifetime=60,quota=0.2`."""

    def __post_init__(self) -> None:
        if not self.lifetime > 0 or not 0 < self.quota <= 1 or not self.saved > 0:
            raise ValueError(
                f"lifetime={self.lifetime} and saved={self.saved} must be positive,"
                f" quota={self.quota} lie in (0, 1]"
            )
        if not self.search_cost >= 0 or self.trial < 0:
            raise ValueError(
                f"search_cost={self.search_cost} and trial={self.trial} must be 0 or more"
            )
        self.by_category()

    def by_category(self) -> dict[str, CategoryConfig]:
        """Return the configs of the categories that `terms` names.

        Raises:
            ValueError: A term cannot be read, or names a category twice.
        """
        configs: dict[str, CategoryConfig] = {}
        for text in self.terms:
            category, colon, settings = text.rpartition(":")
            if not colon or category in configs:
                raise ValueError(
                    f"terms={text!r} must be CATEGORY:FIELD=VALUE,..., each category once"
                )
            fields: dict[str, float | int] = {}
            for term in settings.split(","):
                field, _, value = term.partition("=")
                if field not in _TERMS or field in fields:
                    raise ValueError(
                        f"terms={text!r}: {field!r} must be one of {', '.join(_TERMS)}, once"
                    )
                try:
                    fields[field] = int(value) if field == "trial" else float(value)
                except ValueError:
                    raise ValueError(f"terms={text!r}: {value!r} is no number") from None
            try:
                configs[category] = dataclasses.replace(self, terms=(), **fields)
            except ValueError as error:
                raise ValueError(f"terms={text!r}: {error}") from None
        return configs

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        return _Category(self, {use.item: use.category for use in trace})


class _Category(LRU):
    def __init__(self, config: CategoryConfig, categories: dict[Item, str]):
        super().__init__()
        self._config = config
        self._categories = categories
        self._own = config.by_category()
        self._stored: dict[Item, float] = {}
        self._counts: dict[str, tuple[int, int]] = {}

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        super().note_use(number, use, is_hit=is_hit)
        uses, hits = self._counts.get(use.category, (0, 0))
        self._counts[use.category] = (uses + 1, hits + is_hit)
        if not is_hit:
            self._stored[use.item] = use.time

    def is_valid(self, use: Use) -> bool:
        return use.time - self._stored[use.item] < self._terms(use).lifetime

    def admit(
        self, number: int, use: Use, items: Mapping[Item, float], capacity: float
    ) -> Sequence[Item] | None:
        terms = self._terms(use)
        room = terms.quota * capacity
        uses, hits = self._counts.get(use.category, (0, 0))
        is_judged = uses >= terms.trial
        if use.size > room or (is_judged and hits < terms.search_cost / terms.saved * uses):
            return None
        sizes = {i: size for i, size in items.items() if self._categories[i] == use.category}
        gone = []
        while sizes and math.fsum((use.size, *sizes.values())) > room:
            gone.append(min(sizes, key=lambda item: self.last[item]))
            del sizes[gone[-1]]
        return gone

    def _terms(self, use: Use) -> CategoryConfig:
        return self._own.get(use.category, self._config)
