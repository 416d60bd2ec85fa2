# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Loads what a predictor expects next, and evicts what it does not expect.

Source: ExpertFlow (arXiv:2410.17954): tables from token ids to experts predict all layers of a
batch; when the router has spoken, its choice replaces the prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PredictedConfig(ItemCacheConfig):
    """Items that a predictor expects; of the others the least recently used goes first."""

    name: ClassVar[str] = "predicted"

    ahead: int = 8
    """Items to load ahead at most."""

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise ValueError(f"ahead={self.ahead} must be 0 or more")

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        del trace
        return _Predicted(self.ahead)


class _Predicted(ItemCache):
    def __init__(self, ahead: int):
        self._last: dict[Item, int] = {}
        self._ahead = ahead
        self._expected: dict[Item, int] = {}

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        self._last[use.item] = number
        self._expected.pop(use.item, None)
        if use.expected:
            self._expected = {item: place for place, item in enumerate(use.expected)}

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        def key(item: Item) -> tuple[int, int]:
            # Unexpected ones first, by their last use or load; then what is expected last.
            place = self._expected.get(item)
            if place is not None:
                return (1, -place)
            return (0, max(self._last.get(item, -1), items[item]))

        return min(items, key=key)

    def prefetch(self, number: int, use: Use) -> Sequence[Item]:
        return tuple(self._expected)[: self._ahead] if use.expected else ()
