# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps the experts with the largest running score of the router, and loads the next layer's.

Source: HybriMoE (arXiv:2504.05897) and its code: S = a top(s) + (1 - a) S, where top keeps the 2 K
largest scores of a layer and sets the others to 0; the item with the lowest S is evicted, the next
layer's experts with the highest are loaded ahead. The code reads the scores of one token of a
batch; here a use brings those of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScoresConfig(ItemCacheConfig):
    """Lowest running score of the router."""

    name: ClassVar[str] = "scores"

    weight: float = 0.5
    """Weight of the newest scores (a)."""
    kept: int = 16
    """Scores of a layer that count, of any K; the paper has 2 K, which a trace does not hold."""
    ahead: int = 2
    """Experts of the next layer to load ahead."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1 or self.kept < 1 or self.ahead < 0:
            raise ValueError(
                f"weight={self.weight} must lie in (0, 1], kept={self.kept} be positive,"
                f" ahead={self.ahead} not negative"
            )

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        following: dict[str, str] = {}
        for use, later in zip(trace, trace[1:], strict=False):
            if use.category != later.category:
                following.setdefault(use.category, later.category)
        return _Scores(self, following)


class _Scores(ItemCache):
    def __init__(self, config: ScoresConfig, following: dict[str, str]):
        self._config = config
        self._following = following
        self._scores: dict[Item, float] = {}
        self._members: dict[str, list[Item]] = {}

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        if not use.scores:
            return
        weight = self._config.weight
        top = sorted(use.scores, key=lambda item: -use.scores[item])[: self._config.kept]
        self._members[use.category] = list(use.scores)
        for item in use.scores:
            new = use.scores[item] if item in top else 0.0
            self._scores[item] = weight * new + (1 - weight) * self._scores.get(item, 0.0)

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        return min(items, key=lambda item: self._scores.get(item, 0.0))

    def prefetch(self, number: int, use: Use) -> Sequence[Item]:
        if not use.scores:
            return ()
        members = self._members.get(self._following.get(use.category, ""), [])
        return sorted(members, key=lambda item: -self._scores[item])[: self._config.ahead]
