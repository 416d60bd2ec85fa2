# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of uses on a cache of bounded size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from jaxmoe.contrib.serving_lab.caches.base import Item, ItemCache, ItemCacheConfig, Use


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What a policy would have done."""

    hits: tuple[bool, ...]
    """Whether each use found its item in the cache."""
    loads: int
    """Items loaded, those ahead of their use included."""
    bytes_loaded: float
    bytes_missed: float
    """Bytes that a use had to wait for."""

    @property
    def hit_rate(self) -> float:
        """Share of the uses that found their item."""
        return sum(self.hits) / max(len(self.hits), 1)

    def seconds(self, bandwidth: float, latency: float = 0.0) -> float:
        """Return the time that uses waited for their items.

        Args:
            bandwidth: Bytes per second into the cache.
            latency: Seconds per transfer.
        """
        return self.bytes_missed / bandwidth + latency * self.hits.count(False)


def replay(trace: Sequence[Use], config: ItemCacheConfig, capacity: float) -> Replayed:
    """Return what a policy would have done with a trace.

    Args:
        trace: Uses in the order of time.
        config: Policy.
        capacity: Bytes of the cache. A larger item is used and not stored.
    """
    if not capacity >= 0:
        raise ValueError(f"capacity={capacity} must be 0 or more bytes")
    sizes = {item: use.size for use in trace for item in use.scores}
    sizes |= {use.item: use.size for use in trace}
    cache = BoundedCache(config.build(trace), capacity, sizes)
    return Replayed(
        hits=tuple(cache.use(use) for use in trace),
        loads=cache.loads,
        bytes_loaded=cache.bytes_loaded,
        bytes_missed=cache.bytes_missed,
    )


class BoundedCache:
    """Items within a capacity, which a policy chooses; `replay` and caches of real items use it."""

    def __init__(
        self,
        policy: ItemCache,
        capacity: float,
        sizes: Mapping[Item, float],
        *,
        on_load: Callable[[Item], None] | None = None,
        on_drop: Callable[[Item], None] | None = None,
    ):
        """Begin with no item.

        Args:
            policy: Policy of one replay.
            capacity: Bytes.
            sizes: Bytes of every item; others are not loaded ahead.
            on_load: Called with an item that is stored from now on.
            on_drop: Called with an item that is not stored any more, before another one is.
        """
        self.policy = policy
        self.capacity = capacity
        self.sizes = sizes
        self.held: dict[Item, float] = {}
        self._stored: dict[Item, int] = {}
        self.loads = 0
        self.bytes_loaded = self.bytes_missed = 0.0
        self._number = 0
        self._on_load = on_load
        self._on_drop = on_drop

    def use(self, use: Use) -> bool:
        """Use an item and load it where it is missed, and others ahead; return whether it was held.

        Args:
            use: Next use.
        """
        number = self._number
        is_held = use.item in self.held
        self._number += 1
        is_hit = is_held and self.policy.is_valid(use)
        if not is_hit:
            self.bytes_missed += use.size
            if is_held:
                self._drop(use.item)
            self.loads += 1
            self.bytes_loaded += use.size
            displaced = self.policy.admit(number, use, self.held, self.capacity)
            if displaced is not None:
                for item in displaced:
                    self._drop(item)
                self._store(number, use.item, set())
        self.policy.note_use(number, use, is_hit=is_hit)
        ahead = [item for item in self.policy.prefetch(number, use) if item in self.sizes]
        protected = {use.item, *(item for item in ahead if item in self.held)}
        for item in ahead:
            if item not in self.held:
                if not self._store(number, item, protected):
                    break
                self.loads += 1
                self.bytes_loaded += self.sizes[item]
            protected.add(item)
        return is_hit

    def _store(self, number: int, item: Item, protected: set[Item]) -> bool:
        """Store an item, evicting others but those to keep; False if there is no room."""
        size = self.sizes[item]
        # Exact sums: whether an item fits does not depend on the order of the others.
        if (
            math.fsum(
                (
                    size,
                    *(
                        self.held[protected_item]
                        for protected_item in protected
                        if protected_item in self.held
                    ),
                )
            )
            > self.capacity
        ):
            return False
        while math.fsum((size, *self.held.values())) > self.capacity:
            candidates = {i: place for i, place in self._stored.items() if i not in protected}
            self._drop(self.policy.victim(number, candidates))
        self.held[item] = size
        self._stored[item] = number
        if self._on_load is not None:
            self._on_load(item)
        return True

    def _drop(self, item: Item) -> None:
        """Remove an item."""
        del self.held[item], self._stored[item]
        if self._on_drop is not None:
            self._on_drop(item)
