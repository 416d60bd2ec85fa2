# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The local dispatcher: every device computes all experts for its own tokens.

Expert weights are gathered to each device before use (fully sharded data parallelism); no token
travels. Dropless. Choose it on one device and for small models.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher, DispatcherTraits
from sharding.expert_parallel.permute import permute_rows, sort_by_expert


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig(Dispatcher):
    """All experts on every device; tokens stay where they are."""

    name: ClassVar[str] = "local"
    traits: ClassVar[DispatcherTraits] = DispatcherTraits(spreads_experts=False)

    @property
    def keeps_rows(self) -> bool:
        """False: to take rows again costs a pass over memory."""
        return False

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Sort the assigned rows by expert, on this device."""
        order = sort_by_expert(outgoing.expert_ids, outgoing.num_experts)
        return Dispatched(
            rows=permute_rows(outgoing.rows, order.order, order.inverse),
            group_sizes=order.group_sizes,
            gates=permute_rows(outgoing.gates, order.order, order.inverse)[:, 0],
            weights=outgoing.weights,
            undo=lambda outputs: permute_rows(outputs, order.inverse, order.order),
            dropped=outgoing.none_dropped(),
            indices=outgoing.indices_of(order.order, order.inverse),
        )

    def arriving_places(self, *, sent: float, worst: float) -> float:
        """Return the device's own rows: no others arrive."""
        del worst
        return sent
