# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-to-all dispatcher with bounded buffers: what does not fit is dropped and counted.

    C = ceil(capacity_factor A / P)      rows between two devices, at most the worst case

for A assignments on each of P devices. Of the assignments for one device the first C by slot
travel: in token-major order the earlier tokens of a device win, whatever their gates. The others
contribute exactly 0, to the output and to every gradient, and are counted by expert in
`Dispatched.dropped`. Bytes are those of `sharding/expert_parallel/all_to_all.py` with this C,
memory on arrival P C rows.

The bound holds for each pair of devices, not for each expert: a hot expert may take the places of
other experts on the same device. Where nothing overflows the result equals that of `all_to_all`.
With chunks the bound holds for each chunk: A is then the assignments of a chunk, and a burst of
tokens loses more.

What is dropped depends on the mesh, and so does the loss; capacity per expert, which does not, is
`moe.capacity`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from sharding.expert_parallel.all_to_all import ExpertsKeep, check_num_chunks
from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher, DispatcherTraits
from sharding.expert_parallel.permute import loads, sort_by_expert
from sharding.expert_parallel.transport import (
    Transport,
    TransportChoice,
    choose_transport,
    exchange,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllDroppingConfig(Dispatcher):
    """Rows travel to the device of their expert in bounded buffers; the rest is dropped."""

    name: ClassVar[str] = "all_to_all_dropping"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(has_bound=True)

    capacity_factor: float = 2.0
    """Rows that may travel between two devices, in even shares of a device's assignments."""
    transport: Transport | None = None
    """ragged: only rows, on accelerators; equal: whole buffers, everywhere; None: ragged where it
    exists."""
    num_chunks: int = 1
    """Parts of a device's tokens, one of which can travel while another is computed."""
    experts_keep: ExpertsKeep = "received"
    """received: the backward pass finds the rows that arrived; inputs: they are sent again."""

    def __post_init__(self):
        check_num_chunks(self.num_chunks)
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(
                f"execution.dispatcher.capacity_factor={self.capacity_factor} must be a positive"
                " number: 1 is an even share, and for no drops at all choose all_to_all"
            )

    @property
    def chunks(self) -> int:
        """Parts of a device's tokens that are sent, computed and returned one after the other."""
        return self.num_chunks

    @property
    def keeps_rows(self) -> bool:
        """Whether the backward pass finds the rows that arrived."""
        return self.experts_keep == "received"

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Send the first rows for each device to it, and drop the others."""
        expert_ids = outgoing.expert_ids
        num_experts = outgoing.num_experts
        devices = jax.lax.axis_size(outgoing.axes.expert)
        num_local = outgoing.axes.experts_held(num_experts)
        share = math.ceil(self.capacity_factor * expert_ids.shape[0] / devices)
        most = min(share, outgoing.most_for_groups(num_local))
        is_kept = first_of_each_device(expert_ids, num_experts, devices, most)
        sent = exchange(
            outgoing.rows,
            outgoing.gates,
            is_kept,
            num_experts=num_experts,
            most=most,
            axes=outgoing.axes,
            transport=self.transport,
        )
        dropped = loads(expert_ids, num_experts) - loads(is_kept, num_experts)
        return sent.dispatch_results(outgoing.weights, dropped.astype(jnp.float32))

    def transport_choice(self) -> TransportChoice:
        """Return the transport of rows between devices and its reason."""
        return choose_transport(self.transport)

    def arriving_places(self, *, sent: float, worst: float) -> float:
        """Return the buffers of one chunk, at most its worst case."""
        return min(worst, self.capacity_factor * sent) / self.num_chunks


def first_of_each_device(
    expert_ids: Int[Array, " A"], num_experts: int, num_devices: int, most: int
) -> Int[Array, " A"]:
    """Return the ids with E in place of all but the first few for each device.

    Args:
        expert_ids: Values in [0, E].
        num_experts: E, consecutive ones on each device.
        num_devices: P.
        most: Ids kept for each device.
    """
    device = expert_ids.astype(jnp.int32) // (num_experts // num_devices)
    order = sort_by_expert(device, num_devices)  # ties in slot order; P: empty
    starts = jnp.cumsum(order.group_sizes) - order.group_sizes
    rank = order.inverse - starts.at[device].get(mode="clip")
    return jnp.where(rank < most, expert_ids, num_experts)
