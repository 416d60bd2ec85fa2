# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Divides the experts of a layer between the host's CPU and an accelerator that holds some of them.

Source: HybriMoE (arXiv:2504.05897): experts with few tokens are computed by the host, where they
lie; those with many travel to the accelerator, the largest first, while it computes the ones that
it holds. Here every number of experts for the host is tried, the smallest loads first, those that
the accelerator lacks before those that it holds; and nothing is worse than one device alone.

The split is the best of all if the accelerator takes equally long for every expert, as it does
while it is bound by reading weights. Else it exceeds the best by less than the number of experts
times the spread of these times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from jaxmoe.contrib.serving_lab.caches.base import Item


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitCosts:
    """Rates of host, accelerator and the link between them, for experts of one size."""

    parameters: int
    """Parameters of an expert."""
    flops: float
    """FLOP/s of the accelerator."""
    bandwidth: float
    """Bytes per second of the accelerator's memory."""
    host_flops: float
    """FLOP/s of the host."""
    host_bandwidth: float
    """Bytes per second of the host's memory."""
    link_bandwidth: float
    """Bytes per second from host to accelerator."""
    weight_bytes: int = 2
    """Bytes of a parameter."""

    @property
    def transfer(self) -> float:
        """Seconds for moving an expert to the accelerator."""
        return self.parameters * self.weight_bytes / self.link_bandwidth

    def accelerator(self, load: int) -> float:
        """Return the seconds of the accelerator for an expert with some tokens."""
        return self._seconds(load, self.flops, self.bandwidth)

    def host(self, load: int) -> float:
        """Return the seconds of the host for an expert with some tokens."""
        return self._seconds(load, self.host_flops, self.host_bandwidth)

    def _seconds(self, load: int, flops: float, bandwidth: float) -> float:
        arithmetic = 2.0 * load * self.parameters / flops
        return max(arithmetic, self.parameters * self.weight_bytes / bandwidth)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Who computes which experts, and how long that takes."""

    host: tuple[Item, ...]
    accelerator: tuple[Item, ...]
    """Experts that it holds, then those that travel, in this order."""
    seconds: float
    accelerator_alone: float
    """Seconds if the accelerator computed all."""
    host_alone: float
    """Seconds if the host computed all."""


def split_experts(loads: Mapping[Item, int], items: Collection[Item], costs: SplitCosts) -> Split:
    """Return a division of the experts of a layer.

    Args:
        loads: Tokens of each expert that has any.
        items: Experts in the accelerator's memory.
        costs: Rates.
    """
    ascending = sorted(loads, key=lambda item: loads[item])
    missing = [item for item in ascending if item not in items]
    present = [item for item in ascending if item in items]

    def split(absent: int, owned: int) -> tuple[float, list[Item], list[Item]]:
        host = missing[:absent] + present[:owned]
        moved = missing[absent:][::-1]
        stays = present[owned:]
        device = _accelerator_seconds(
            [costs.accelerator(loads[item]) for item in stays],
            [costs.accelerator(loads[item]) for item in moved],
            costs.transfer,
        )
        seconds = max(device, sum(costs.host(loads[item]) for item in host))
        return seconds, host, stays + moved

    counts = [(absent, 0) for absent in range(len(missing) + 1)]
    counts += [(a, owned) for a, _ in counts for owned in range(1, len(present) + 1)]
    seconds, host, device = min((split(*count) for count in counts), key=lambda count: count[0])
    return Split(
        host=tuple(host),
        accelerator=tuple(device),
        seconds=seconds,
        accelerator_alone=split(0, 0)[0],
        host_alone=split(len(missing), len(present))[0],
    )


def _accelerator_seconds(resident: list[float], moved: list[float], transfer: float) -> float:
    """Return the time at which the accelerator is done with experts that arrive one by one.

    Args:
        resident: Seconds of experts that it holds.
        moved: Seconds of experts that travel, in this order.
        transfer: Seconds of a transfer.
    """
    moving = sum(moved)
    last = sum(resident) + moving
    for place, seconds in enumerate(moved, 1):
        last = max(last, place * transfer + moving)
        moving -= seconds
    return last
