# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records and interface of item caches: items with sizes, a trace of uses, a policy."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import ClassVar

Item = Hashable
"""Name of an item: (layer, expert), a layer, a model, the name of a page, a query."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One use of an item."""

    item: Item
    size: float = 1.0
    """Bytes."""
    category: str = ""
    """Kind of item, for policies that distinguish kinds."""
    time: float = 0.0
    """Seconds."""
    scores: Mapping[Item, float] = dataclasses.field(default_factory=dict)
    """Scores of items of the same kind that are known with this use, such as of all experts of the
    layer by the router."""
    expected: tuple[Item, ...] = ()
    """Items that a predictor expects next."""


class ItemCache(abc.ABC):
    """State of a policy during a replay; subclasses override what they decide."""

    def note_use(self, number: int, use: Use, *, is_hit: bool) -> None:
        """Take note of a use.

        Args:
            number: Place in the trace.
            use: Use.
            is_hit: Whether the item was in the cache.
        """
        del number, use, is_hit

    @abc.abstractmethod
    def victim(self, number: int, items: Mapping[Item, int]) -> Item:
        """Return the item to evict.

        Args:
            number: Place in the trace.
            items: Items that may be evicted, at least one, with the place in the trace at which
                each was stored, after a miss or ahead of its use.
        """

    def admit(
        self, number: int, use: Use, items: Mapping[Item, float], capacity: float
    ) -> Sequence[Item] | None:
        """Return the items that go for a missed item, room or not; none by default.

        Args:
            number: Place in the trace.
            use: Use that missed.
            items: Bytes of the items in the cache.
            capacity: Bytes of the cache.

        Returns:
            Items of the cache; None where the missed item is not stored.
        """
        del number, use, items, capacity
        return ()

    def is_valid(self, use: Use) -> bool:
        """Return whether an item in the cache may still be used; all may by default."""
        del use
        return True

    def prefetch(self, number: int, use: Use) -> Sequence[Item]:
        """Return items to load ahead of their use, the most urgent first; none by default."""
        del number, use
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ItemCacheConfig(abc.ABC):
    """A policy of an item cache."""

    name: ClassVar[str]
    is_live: ClassVar[bool] = True
    """Stores every item that is used, and decides without the trace of the uses to come."""

    @abc.abstractmethod
    def build(self, trace: Sequence[Use]) -> ItemCache:
        """Return the policy for one replay.

        Args:
            trace: All uses; only `belady` looks at those to come.
        """
