# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-to-all dispatcher with bounded buffers: what does not fit is dropped, and counted.

    C = ceil(capacity_factor A / P)      rows between two devices, at most the worst case

for A assignments on each of P devices. Of those for the same device the first C by slot travel: in
token-major order the earlier tokens of a device win, whatever their gates. The others contribute
exactly 0, to the output and to every gradient, and are counted by expert in `Dispatched.dropped`.
Bytes are those of `sharding/expert_parallel/all_to_all.py` with this C, memory on arrival P C rows.

The bound is per pair of devices, not per expert: a hot expert may take the places of its neighbours
on the same device, and where nothing overflows the result is that of `all_to_all`. With chunks the
bound holds for each: A is then the assignments of a chunk, and a burst of tokens loses more.

What is dropped depends on the mesh, so that the loss does too; capacity per expert, which does
not, is `moe.capacity`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sharding.assignments import Assignments
from sharding.expert_parallel.all_to_all import check_num_chunks, most_rows
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes
from sharding.expert_parallel.local import assigned_rows
from sharding.expert_parallel.permute import loads, sort_by_expert
from sharding.expert_parallel.transport import Transport, exchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllDroppingConfig:
    """Rows travel to the device of their expert in bounded buffers; the rest is dropped."""

    name: ClassVar[str] = "all_to_all_dropping"
    spreads_experts: ClassVar[bool] = True
    gathers_tokens: ClassVar[bool] = False

    capacity_factor: float = 2.0
    """Rows that may travel between two devices, in even shares of a device's assignments."""
    transport: Transport | None = None
    """ragged: nothing but rows, on accelerators; equal: whole buffers, everywhere; None: ragged
    where it exists."""
    num_chunks: int = 1
    """Parts of a device's tokens, one of which can travel while another is computed."""

    def __post_init__(self):
        check_num_chunks(self.num_chunks)
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"execution.dispatcher.capacity_factor={self.capacity_factor} must be a positive"
                " number: 1 is an even share, and for no drops at all choose all_to_all"
            )


def dispatch_all_to_all_dropping(
    x: Float[Array, "T D"],
    assignments: Assignments,
    weights: Any,
    *,
    num_experts: int,
    axes: ExpertAxes,
    config: AllToAllDroppingConfig,
) -> Dispatched:
    """Sends each row to the device of its expert, as long as there is room.

    Args:
        x: the tokens of this device.
        assignments: of these tokens, whose experts differ.
        weights: of the experts held here.
        num_experts: E.
        axes: where experts lie.
        config: how much room there is, and whose transport is taken.
    """
    given, devices = assignments.expert_ids, jax.lax.axis_size(axes.expert)
    share = math.ceil(config.capacity_factor * given.shape[0] / devices)
    most = min(share, most_rows(x, assignments, num_experts, axes))
    kept = first_of_each_device(given, num_experts, devices, most)
    sent = exchange(
        assigned_rows(x, assignments),
        kept,
        num_experts=num_experts,
        most=most,
        axes=axes,
        transport=config.transport,
    )
    return Dispatched(
        rows=sent.rows,
        group_sizes=sent.group_sizes,
        weights=weights,
        undo=sent.undo,
        dropped=(loads(given, num_experts) - loads(kept, num_experts)).astype(jnp.float32),
    )


def first_of_each_device(
    expert_ids: Int[Array, " A"], num_experts: int, num_devices: int, most: int
) -> Int[Array, " A"]:
    """The ids with E in place of all but the first few for each device.

    Args:
        expert_ids: in [0, E].
        num_experts: E, consecutive ones on each device.
        num_devices: P.
        most: how many remain for each device.
    """
    device = expert_ids.astype(jnp.int32) // (num_experts // num_devices)
    order = sort_by_expert(device, num_devices)  # ties in slot order; P: empty
    starts = jnp.cumsum(order.group_sizes) - order.group_sizes
    rank = order.inverse - starts.at[device].get(mode="clip")
    return jnp.where(rank < most, expert_ids, num_experts)
