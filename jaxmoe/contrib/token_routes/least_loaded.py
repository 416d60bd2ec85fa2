# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The least-loaded dispatcher: overloaded devices lend experts, with their rows, to others.

    counts    all-gather of E integers from each device, the same plan on all of them
    rows      there and back as in `all_to_all`, with e + slots groups on each device
    weights   of lent experts to their borrowers, gradients back

Every device then computes the rows of its own experts and of borrowed ones, and by the plan's bound
none has many more than the mean, for any routing. Exact: the same products as in `all_to_all`, on
other devices. While the busiest device has less than `threshold` times the mean nothing is lent, no
weights travel, and rows go where `all_to_all` sends them.

    bytes     of rows: those of `sharding/expert_parallel/all_to_all.py`, with C = min(A, T (e +
              slots)); of counts: (P - 1) E + (P - 1) P (e + slots) integers; of weights:
              `jaxmoe/contrib/token_routes/borrowed_weights.py`
    memory    `slots` experts and their gradients on each device, whether or not they are used

Buffers on arrival have the size of the worst case, as shapes are static: only the time of the
busiest device falls. Source: Least-Loaded Expert Parallelism, arXiv 2601.17111.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmoe.contrib.token_routes.borrowed_weights import with_borrowed
from jaxmoe.contrib.token_routes.least_loaded_plan import LoanPlan, ThresholdPer, make_plan
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher, DispatcherTraits
from sharding.expert_parallel.permute import sort_by_expert
from sharding.expert_parallel.transport import (
    Transport,
    TransportChoice,
    choose_transport,
    exchange,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LeastLoadedConfig(Dispatcher):
    """Rows travel to the device of their expert, or to one that borrows it; none is dropped."""

    name: ClassVar[str] = "least_loaded"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(lends_experts=True)

    borrowed: int = 4
    """Experts that a device may borrow; each takes the memory of one more expert."""
    threshold: float = 1.3
    """Largest load over the mean from which experts are lent."""
    threshold_per: ThresholdPer = "device"
    """Load that the threshold is for; with expert the ratio is reached earlier."""
    capacity_factor: float = 1.0
    """Most rows that a device should compute, in even shares."""
    min_rows: int = 1024
    """Fewest rows worth a copy of an expert's weights, unless no others remain."""
    transport: Transport | None = None
    """ragged: only rows, on accelerators; equal: blocks of the worst case, everywhere; None:
    ragged where it exists."""

    def __post_init__(self):
        where = "execution.dispatcher"
        if self.borrowed < 1:
            raise ValueError(
                f"{where}.borrowed={self.borrowed} must be at least 1: without borrowed experts"
                " choose all_to_all"
            )
        for field in ("threshold", "capacity_factor"):
            value = getattr(self, field)
            if not 1.0 <= value < math.inf:
                raise ValueError(
                    f"{where}.{field}={value} must be a number of at least 1, which is the mean"
                )
        if self.min_rows < 1:
            raise ValueError(
                f"{where}.min_rows={self.min_rows} must be at least 1: any are worth it"
            )

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Send each row to the device that computes it, and borrow the experts missing there."""
        num_experts = outgoing.num_experts
        axes = outgoing.axes
        expert_ids = outgoing.expert_ids
        num_held = axes.experts_held(num_experts)
        devices = jax.lax.axis_size(axes.expert)
        order = sort_by_expert(expert_ids, num_experts)
        counts = jax.lax.all_gather(order.group_sizes, axes.expert)  # [P E], by sender
        plan = make_plan(
            counts.sum(0),
            num_devices=devices,
            slots=min(self.borrowed, num_experts - num_held),
            capacity_factor=self.capacity_factor,
            min_rows=self.min_rows,
            threshold=self.threshold,
            threshold_per=self.threshold_per,
        )
        groups = num_held + plan.borrowed.shape[1]
        starts = _first_rows(counts, axes) + order.group_sizes - jnp.cumsum(order.group_sizes)
        ranks = order.inverse + starts.at[expert_ids].get(mode="clip")
        sent = exchange(
            outgoing.rows,
            outgoing.gates,
            group_of_each_row(expert_ids, ranks, plan),
            num_experts=devices * groups,
            most=outgoing.most_for_groups(groups),
            axes=axes,
            transport=self.transport,
        )
        weights = with_borrowed(outgoing.weights, plan, axes.expert)
        return sent.dispatch_results(weights, outgoing.none_dropped())

    def transport_choice(self) -> TransportChoice:
        """Return the transport of rows between devices and its reason."""
        return choose_transport(self.transport)


def _first_rows(counts: Int[Array, "P E"], axes: ExpertAxes) -> Int[Array, " E"]:
    """Return the rows of each expert that the devices before this one send."""
    before = jnp.cumsum(counts, 0) - counts
    return jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axes.expert), keepdims=False)


def group_of_each_row(
    expert_ids: Int[Array, " A"], ranks: Int[Array, " A"], plan: LoanPlan
) -> Int[Array, " A"]:
    """Return the group of each row: device p has groups from p (e + slots) on, own experts first.

    Args:
        expert_ids: Values in [0, E].
        ranks: Rank of each row among the rows of its expert, over all devices.
        plan: Rows of each expert on each device, in order of devices.

    Returns:
        Values in [0, P (e + slots)], the largest where the slot is empty.
    """
    (num_experts, devices), slots = plan.rows.shape, plan.borrowed.shape[1]
    num_held = num_experts // devices
    ends = jnp.cumsum(plan.rows, 1).at[expert_ids].get(mode="clip")  # [A P]
    device = (ends <= ranks[:, None]).sum(1, dtype=jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)[:, None, None]
    behind = num_held + jnp.arange(slots, dtype=jnp.int32)[None, None, :]
    guests = jnp.where(plan.borrowed[None] == experts, behind, 0).sum(2)  # [E P]
    is_home = experts[..., 0] // num_held == jnp.arange(devices, dtype=jnp.int32)[None, :]
    places = jnp.where(is_home, experts[..., 0] % num_held, guests)
    place = places.at[expert_ids, device].get(mode="clip")
    group = device * (num_held + slots) + place
    return jnp.where(expert_ids < num_experts, group, devices * (num_held + slots))
