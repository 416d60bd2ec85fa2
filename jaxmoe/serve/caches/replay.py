# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of uses on a cache of bounded size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxmoe.serve.caches.base import Item, ItemCache, ItemCacheConfig, Use


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
    cache = _Cache(config.build(trace), capacity, {use.item: use.size for use in trace})
    hits, missed = [], 0.0
    for number, use in enumerate(trace):
        is_held = use.item in cache.held
        hits.append(is_held and cache.policy.is_valid(use))
        if not hits[-1]:
            missed += use.size
            if is_held:
                cache.drop(use.item)
            cache.loads += 1
            cache.bytes_loaded += use.size
            if cache.policy.stores(number, use, cache.held, capacity):
                cache.store(number, use.item, set())
        cache.policy.used(number, use, is_hit=hits[-1])
        ahead = [item for item in cache.policy.prefetch(number, use) if item in cache.sizes]
        kept = {use.item, *(item for item in ahead if item in cache.held)}
        for item in ahead:
            if item not in cache.held:
                if not cache.store(number, item, kept):
                    break
                cache.loads += 1
                cache.bytes_loaded += cache.sizes[item]
            kept.add(item)
    return Replayed(
        hits=tuple(hits),
        loads=cache.loads,
        bytes_loaded=cache.bytes_loaded,
        bytes_missed=missed,
    )


class _Cache:
    """Items within a capacity."""

    def __init__(self, policy: ItemCache, capacity: float, sizes: dict[Item, float]):
        self.policy, self.capacity, self.sizes = policy, capacity, sizes
        self.held: dict[Item, float] = {}
        self.loads = 0
        self.bytes_loaded = 0.0
        self._filled = 0.0

    def store(self, number: int, item: Item, kept: set[Item]) -> bool:
        """Store an item, evicting others but those to keep; False if there is no room."""
        size = self.sizes[item]
        room = self.capacity - sum(self.held[other] for other in kept if other in self.held)
        if size > room:
            return False
        while self._filled + size > self.capacity:
            self.drop(self.policy.victim(number, [i for i in self.held if i not in kept]))
        self.held[item] = size
        self._filled += size
        self.policy.loaded(number, item)
        return True

    def drop(self, item: Item) -> None:
        """Remove an item."""
        self._filled -= self.held.pop(item)
