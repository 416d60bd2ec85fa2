# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps a window of items that are used in a fixed cycle, such as the layers of a model.

Source: TPI-LLM (arXiv:2410.00531): the next layers are read while one is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WindowConfig(ItemCacheConfig):
    """The next items of a cycle."""

    name: ClassVar[str] = "window"
    is_live: ClassVar[bool] = False

    ahead: int = 2
    """Items to load ahead."""

    def __post_init__(self) -> None:
        if self.ahead < 0:
            raise ValueError(f"ahead={self.ahead} must be 0 or more")

    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay."""
        return _Window(self.ahead, list(dict.fromkeys(use.item for use in trace)))


class _Window(ItemCache):
    def __init__(self, ahead: int, cycle: list[Item]):
        self._ahead = ahead
        self._cycle = cycle
        self._place = {item: place for place, item in enumerate(cycle)}
        self._now = 0

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        self._now = self._place[use.item]

    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        """Return the item that the cycle reaches last."""
        return max(items, key=lambda item: (self._place[item] - self._now - 1) % len(self._cycle))

    def prefetch(self, number: int, use: Use) -> Sequence[Item]:
        count = min(self._ahead, len(self._cycle) - 1)
        return [self._cycle[(self._now + 1 + i) % len(self._cycle)] for i in range(count)]
