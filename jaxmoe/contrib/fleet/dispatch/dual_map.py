# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Maps the beginning of a prompt to two instances, and takes the one with more of it cached.

Source: DualMap (arXiv:2602.06502): two hashes of the beginning give two candidates, so that equal
beginnings meet and the load still spreads (the power of two choices). The candidate with the longer
cached beginning serves, unless its predicted time to the first token breaks the promise: then the
other. Requests that wait too long at one candidate move to the other.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from typing import ClassVar

from jaxmoe.contrib.fleet.dispatch.base import (
    DispatchConfig,
    FleetView,
    Move,
    RequestDispatcher,
    Route,
    cached_tokens,
    wait,
)
from jaxmoe.serve.requests import Request

POINTS = 32
"""Places of each instance on the ring."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DualMapConfig(DispatchConfig):
    """Two instances for each beginning of a prompt."""

    name: ClassVar[str] = "dual_map"

    prefix: int = 64
    """Tokens of the beginning that is hashed."""

    def build(self) -> RequestDispatcher:
        """Return the policy for one fleet."""
        return _DualMap(self.prefix)


class _DualMap(RequestDispatcher):
    def __init__(self, prefix: int):
        self._prefix = prefix

    def place(self, request: Request, fleet: FleetView) -> Route:
        if len(fleet.members) == 1:
            return Route(0)
        hits = {
            i: cached_tokens(fleet.members[i], request)
            for i in self.candidates(request, len(fleet.members))
        }
        first, second = sorted(hits, key=lambda i: (-hits[i], wait(fleet.members[i]), i))
        limit = request.objective.ttft if request.objective else float("inf")
        waits = {i: wait(fleet.members[i], len(request.prompt) - hits[i]) for i in hits}
        return Route(second if waits[first] > limit and waits[second] < waits[first] else first)

    def rebalance(self, fleet: FleetView) -> tuple[Move, ...]:
        for number, view in enumerate(fleet.members):
            seconds = wait(view) if view.waiting else 0.0
            for sequence in reversed(view.waiting):
                objective = sequence.request.objective
                if objective is None or sequence.num_written or len(fleet.members) < 2:
                    continue
                waited = fleet.now - sequence.arrived
                wait_here = waited + seconds
                if wait_here <= objective.ttft or waited >= objective.ttft:
                    continue
                pair = self.candidates(sequence.request, len(fleet.members))
                partner = pair[1] if pair[0] == number else pair[0]
                wait_there = waited + wait(fleet.members[partner], sequence.left)
                if wait_there < min(wait_here, objective.ttft):
                    return (Move(sequence.id, number, partner),)
        return ()

    def candidates(self, request: Request, count: int) -> tuple[int, int]:
        """Return two instances, which depend on the beginning of the prompt alone.

        Args:
            request: Request.
            count: Instances, at least two.
        """
        ring = _ring(count)
        prefix = tuple(request.prompt[: self._prefix])
        beginning = f"{request.adapter} {request.salt} {prefix}"
        members: list[int] = []
        for seed in range(64):
            place = _hash(f"{seed} {beginning}")
            chosen = ring[bisect.bisect_left(ring, (place, 0)) % len(ring)][1]
            if chosen not in members:
                members.append(chosen)
            if len(members) == 2:
                break
        else:
            members = [members[0], (members[0] + 1) % count]
        return members[0], members[1]


@functools.cache
def _ring(count: int) -> list[tuple[int, int]]:
    """Return the places of some instances, rising, and the instance at each."""
    return sorted((_hash(f"{i} {p}"), i) for i in range(count) for p in range(POINTS))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
