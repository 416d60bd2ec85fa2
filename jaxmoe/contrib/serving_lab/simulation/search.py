# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds how to divide instances between phases, and layers between stages.

Sources: DistServe (arXiv:2401.09670): the numbers of instances for prompts and for answers with
the largest rate per device at which 90% of the requests keep their objective; the rate is found by
bisection. ParetoPipe (arXiv:2601.08025): the cuts of a chain of layers into stages that no other
beats in latency and in throughput; here by dynamic programming over such fronts, because a
dominated beginning cannot be part of a better whole.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

SHARE = 0.9
"""Share of the requests that must keep their objective."""
_ROUNDING = 1e-9
"""Relative difference of latencies that are equal but for the order of their sums."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Numbers of instances for each phase, and the rate that they serve."""

    prefill: int
    """Instances for prompts."""
    decode: int
    """Instances for answers."""
    rate: float
    """Requests per second of all of them, within the objective."""

    @property
    def per_instance(self) -> float:
        """Requests per second of each."""
        return self.rate / (self.prefill + self.decode)


def largest_rate(
    within: Callable[[float], float], low: float, high: float, *, tolerance: float = 0.02
) -> float:
    """Return the largest rate at which enough requests keep their objective; 0 if there is none.

    Args:
        within: Share of the requests that keep it at a rate; it falls with the rate.
        low: Smallest rate to consider.
        high: Largest rate to consider.
        tolerance: Relative width of the last interval.
    """
    if within(low) < SHARE:
        return 0.0
    if within(high) >= SHARE:
        return high
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) >= SHARE else (low, middle)
    return low


def place_phases(
    within: Callable[[int, int, float], float],
    most_instances: int,
    *,
    low: float,
    high: float,
    tolerance: float = 0.02,
) -> Phases | None:
    """Return the division with the largest rate per instance; None if no rate is served.

    A division whose share is too small at the rate to beat is not looked at further.

    Args:
        within: Share of the requests within the objective, of (prefill, decode, rate).
        most_instances: Instances at most, both phases together.
        low: Smallest rate per instance to consider.
        high: Largest rate per instance to consider.
        tolerance: Relative precision of the rate.
    """
    best: Phases | None = None
    for total in range(2, most_instances + 1):
        for prefill in range(1, total):
            decode = total - prefill
            least = low if best is None else best.per_instance
            if least >= high:
                return best

            def share(rate: float, prefills: int = prefill, decodes: int = decode) -> float:
                return within(prefills, decodes, rate)

            rate = largest_rate(share, least * total, high * total, tolerance=tolerance)
            if rate > least * total or (best is None and rate):
                best = Phases(prefill=prefill, decode=decode, rate=rate)
    return best


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageCut:
    """A chain of layers in stages."""

    borders: tuple[int, ...]
    """First layer of every stage but the first."""
    latency: float
    """Seconds of one item through all stages."""
    interval: float
    """Seconds between two items: the longest stage or transfer."""


def pareto_cuts(
    layers: Sequence[float],
    transfers: Sequence[float],
    *,
    speeds: Sequence[float],
) -> list[StageCut]:
    """Return the cuts that no other beats in latency and interval, ascending by latency.

    Args:
        layers: Seconds of each layer on a device of speed 1.
        transfers: Seconds for passing on the output of each layer but the last.
        speeds: Speed of each device; stage i is on device i, and later devices may stay unused.
    """
    if len(transfers) != len(layers) - 1 or not speeds:
        raise ValueError(
            f"{len(transfers)} transfers and {len(speeds)} speeds must be one fewer than the"
            f" {len(layers)} layers, and at least one"
        )
    sums = [0.0, *itertools.accumulate(layers)]
    count = len(layers)
    fronts: dict[int, list[StageCut]] = {
        end: [StageCut(borders=(), latency=sums[end] / speeds[0], interval=sums[end] / speeds[0])]
        for end in range(1, count + 1)
    }
    cuts = list(fronts[count])
    for speed in speeds[1:]:
        following: dict[int, list[StageCut]] = {}
        for end in range(2, count + 1):
            longer = [
                _join(first, begin, (sums[end] - sums[begin]) / speed, transfers[begin - 1])
                for begin in range(1, end)
                for first in fronts.get(begin, ())
            ]
            following[end] = _front(longer)
        fronts = following
        cuts += fronts.get(count, [])
    return _front(cuts)


def _join(first: StageCut, begin: int, seconds: float, transfer: float) -> StageCut:
    """Return a cut with one more stage."""
    return StageCut(
        borders=(*first.borders, begin),
        latency=first.latency + transfer + seconds,
        interval=max(first.interval, transfer, seconds),
    )


def _front(cuts: Iterable[StageCut]) -> list[StageCut]:
    """Return the cuts that no other dominates; of equal ones that with the fewest stages."""
    front: list[StageCut] = []
    for cut in sorted(
        cuts, key=lambda candidate: (candidate.latency, candidate.interval, len(candidate.borders))
    ):
        if front and cut.interval >= front[-1].interval:
            continue
        if front and cut.latency <= front[-1].latency * (1 + _ROUNDING):
            front.pop()
        front.append(cut)
    return front
