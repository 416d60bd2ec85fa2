# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Places requests at the freest instance, and moves running ones from crowded instances to it.

Source: Llumnix (arXiv:2406.03243) and its code: freeness = (free pages - pages that the waiting
need) / running requests, the steps of decoding for which an instance has room. Below a threshold of
3 an instance gives sequences away, if the difference to the freest shrinks.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    Move,
    RequestDispatcher,
    Route,
)
from jaxmoe.serve.requests import Request
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LlumnixConfig(DispatchConfig):
    """Freest instance; running requests move there."""

    name: ClassVar[str] = "llumnix"
    needs_moves: ClassVar[bool] = True

    threshold: float = 3.0
    """Freeness below which an instance gives sequences away."""

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _Llumnix(self.threshold)


class _Llumnix(RequestDispatcher):
    def __init__(self, threshold: float):
        self._threshold = threshold

    def place(self, request: Request, fleet: FleetView) -> Route:
        del request
        numbers = range(len(fleet.members))
        return Route(max(numbers, key=lambda i: (freeness(fleet.members[i]), -i)))

    def rebalance(self, fleet: FleetView) -> tuple[Move, ...]:
        numbers = range(len(fleet.members))
        source = min(numbers, key=lambda i: (freeness(fleet.members[i]), i))
        target = max(numbers, key=lambda i: (freeness(fleet.members[i]), -i))
        target_view = fleet.members[target]
        source_view = fleet.members[source]
        low = freeness(source_view)
        high = freeness(target_view)
        if low >= self._threshold or source == target:
            return ()
        if any({move.source, move.target} & {source, target} for move in fleet.moves):
            return ()  # the free pages change when it lands
        if target_view.num_running >= target_view.facts.max_running or target_view.waiting:
            return ()
        movable = [
            sequence
            for sequence in source_view.running
            if sequence.left == 1 and sequence.num_written
        ]
        for sequence in sorted(
            movable, key=lambda sequence: (sequence.request.priority, len(sequence.pages))
        ):
            pages = len(sequence.pages)
            after = freeness(target_view, pages, 1) - freeness(source_view, -pages, -1)
            if pages <= target_view.pool.num_free and abs(after) < high - low:
                return (Move(sequence.id, source, target),)
        return ()


def freeness(view: InstanceView, pages: int = 0, requests: int = 0) -> float:
    """Return the steps of decoding for which an instance has free pages, per request.

    Args:
        view: Instance.
        pages: Pages to count as used beyond those that are.
        requests: Requests to count beyond those that are there.
    """
    free = view.pool.num_free - view.waiting.num_pages - pages
    return free / max(view.num_running + len(view.waiting) + requests, 1)
