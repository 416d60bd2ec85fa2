# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Expert grouping of Speculative MoE: clusters token ids and experts on devices together.

    a_j = number of tokens with id j,   C_jk = share of them with expert k,   load_g = sum a_j
    min   balance * sum_g |load_g - mean| + (1 - balance) * sum over j, k on different devices of
          a_j C_jk
    each id and each expert on one device, E/P experts on each

Layers are solved one by one, alternating: ids to devices, the most frequent first and each where it
adds least, then moved one by one while the objective falls; experts to devices given the ids (an
assignment problem, exact). A layer starts from the identity and from the ids of the layer below and
keeps the better result, so it is never worse than identity. Devices are interchangeable: each layer
numbers them so that most tokens stay.

Source: Speculative MoE (arXiv 2503.04398): s-EG. Reading: `balance` weighs counts of tokens against
counts of assignments, 0.5 by default (the paper gives no number).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from jaxmoe.contrib.placement.integer_program import assign_evenly
from jaxmoe.contrib.placement.solution import Placer, Solution
from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement, check_devices

Counts = Int[np.ndarray, "V E"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertGroupingConfig(Placer):
    """Places experts that the same token ids choose on the same device."""

    name: ClassVar[str] = "expert_grouping"

    balance: float = 0.5
    """Weight of equal loads against local experts, in [0, 1]."""

    def __post_init__(self):
        if not 0.0 <= self.balance <= 1.0:
            raise ValueError(f"placer.balance={self.balance} must lie between 0 and 1")

    def solve(self, trace: RoutingTrace, num_devices: int) -> Solution:
        """Return a placement; its cost is the sum of the layers' objectives.

        Args:
            trace: Routing trace with token ids.
            num_devices: P.

        Raises:
            ValueError: P does not divide E.
        """
        check_devices(trace.num_experts, num_devices)
        devices = []
        total = 0.0
        share = trace.num_experts // num_devices
        frequency = np.bincount(trace.token_ids, minlength=trace.vocab_size)
        ids = None
        for layer in range(trace.num_layers):
            counts = trace.by_token(layer, trace.vocab_size)
            identity = np.arange(trace.num_experts) // share
            starts = [identity]
            if ids is not None:
                starts.append(_experts_for(counts, ids, num_devices))
            ends = [self._alternate(counts, frequency, start, num_devices) for start in starts]
            cost, new_ids, experts = min(ends, key=lambda end: end[0])
            if ids is not None:
                names = _as_before(ids, new_ids, frequency, num_devices)
                new_ids = names[new_ids]
                experts = names[experts]
            ids = new_ids
            devices.append(experts)
            total += cost
        return Solution(
            placement=ExpertPlacement(np.stack(devices), num_devices),
            found_by="alternation",
            cost=total,
            gap=None,
        )

    def _alternate(
        self,
        counts: Counts,
        frequency: Int[np.ndarray, " V"],
        experts: Int[np.ndarray, " E"],
        num_devices: int,
    ) -> tuple[float, Int[np.ndarray, " V"], Int[np.ndarray, " E"]]:
        """Return cost, ids and experts when neither turn lowers the cost."""
        best: tuple[float, np.ndarray, np.ndarray] | None = None
        while True:
            ids = cluster_ids(counts, frequency, experts, num_devices, self.balance)
            cost = grouping_cost(counts, frequency, ids, experts, num_devices, self.balance)
            if best is not None and cost >= best[0]:
                return best
            best = (cost, ids, experts)
            experts = _experts_for(counts, ids, num_devices)


def grouping_cost(
    counts: Counts,
    frequency: Int[np.ndarray, " V"],
    ids: Int[np.ndarray, " V"],
    experts: Int[np.ndarray, " E"],
    num_devices: int,
    balance: float,
) -> float:
    """Return the objective of one layer.

    Args:
        counts: a_j C_jk.
        frequency: a_j.
        ids: Device of each token id.
        experts: Device of each expert.
        num_devices: P.
        balance: Weight of equal loads.
    """
    frequencies = np.bincount(ids, weights=frequency, minlength=num_devices)
    uneven = np.abs(frequencies - frequency.sum() / num_devices).sum()
    remote = np.sum(counts, where=ids[:, None] != experts[None, :])
    return float(balance * uneven + (1.0 - balance) * remote)


def cluster_ids(
    counts: Counts,
    frequency: Int[np.ndarray, " V"],
    experts: Int[np.ndarray, " E"],
    num_devices: int,
    balance: float,
) -> Int[np.ndarray, " V"]:
    """Return the device of each token id for given experts; arguments as in `grouping_cost`."""
    local = counts @ np.eye(num_devices)[experts]  # V, P
    mean = frequency.sum() / num_devices
    frequencies = np.zeros(num_devices)
    ids = np.full(len(frequency), -1)
    seen = np.flatnonzero(frequency)
    order = seen[np.argsort(-frequency[seen], kind="stable")]
    is_better = True
    while is_better:
        is_better = False
        for j in order:
            old = ids[j]
            if old >= 0:
                frequencies[old] -= frequency[j]
            added = np.abs(frequencies + frequency[j] - mean) - np.abs(frequencies - mean)
            price = balance * added - (1.0 - balance) * local[j]
            new = int(np.argmin(price))
            # After the first assignment only a true gain moves an id.
            if old >= 0 and price[new] >= price[old] - 1e-9:
                new = old
            is_better |= new != old
            ids[j] = new
            frequencies[new] += frequency[j]
    return np.where(ids < 0, 0, ids)


def _experts_for(
    counts: Counts, ids: Int[np.ndarray, " V"], num_devices: int
) -> Int[np.ndarray, " E"]:
    """Return the best device of each expert for given ids."""
    return assign_evenly(counts.T @ np.eye(num_devices)[ids])


def _as_before(
    old: Int[np.ndarray, " V"],
    new: Int[np.ndarray, " V"],
    frequency: Int[np.ndarray, " V"],
    num_devices: int,
) -> Int[np.ndarray, " P"]:
    """Return new numbers for the devices of a layer, so that most tokens stay."""
    stay = np.zeros((num_devices, num_devices))
    np.add.at(stay, (new, old), frequency)
    return assign_evenly(stay)
