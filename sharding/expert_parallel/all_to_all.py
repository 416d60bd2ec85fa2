# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-to-all dispatcher: rows travel to the device of their expert and back.

With P devices, e = E / P experts on each, T tokens and A assignments per device, rows of D values
of b bytes:

    bytes sent, each way, forward and backward:
        ragged    D b for each row of another device           (P - 1)/P T K D b if balanced
        equal     (P - 1) C D b                                C = min(A, T e)
    once, in the forward pass: (P - 1) E integers, all-gathered
    and a gate of 4 bytes with each row outward, its gradient on the way back; with
    experts_keep=inputs the rows travel outward once more, in the backward pass

C is the exact worst case between two devices: the experts of a token differ, so at most min(K, e)
of them are on one device. P C rows are allocated on arrival with either transport. Dropless: equal
to `local` up to rounding for any routing.

`num_chunks` cuts the tokens of a device into parts that are sent, computed and returned one after
the other in the program, without dependencies between them: a scheduler can compute one while
another travels. Memory on arrival shrinks with it. For the number that pays see
`sharding/expert_parallel/chunks.py`. (Tutel, arXiv 2206.03382; FSMoE, arXiv 2501.10714.)

`token_tables` names the file of a `TokenRoute`, which first moves tokens to other devices
(`sharding/expert_parallel/routes.py`). Exact for any file.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher, DispatcherTraits
from sharding.expert_parallel.transport import (
    Transport,
    TransportChoice,
    choose_transport,
    exchange,
)

ExpertsKeep = Literal["received", "inputs"]
"""What the backward pass finds of rows that travel."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllConfig(Dispatcher):
    """Rows travel to the device of their expert and back; none is dropped."""

    name: ClassVar[str] = "all_to_all"

    transport: Transport | None = None
    """ragged: only rows, on accelerators; equal: blocks of the worst case, everywhere; None:
    ragged where it exists."""
    num_chunks: int = 1
    """Parts of a device's tokens, one of which can travel while another is computed."""
    experts_keep: ExpertsKeep = "received"
    """received: the backward pass finds the rows that arrived; inputs: they are sent again."""
    token_tables: str | None = None
    """File of `jaxmoe place --tables`, the same on every host, by which tokens first move to
    the device that probably holds their experts; None: they stay."""

    def __post_init__(self):
        check_num_chunks(self.num_chunks)

    @property
    def chunks(self) -> int:
        """Parts of a device's tokens that are sent, computed and returned one after the other."""
        return self.num_chunks

    @property
    def traits(self) -> DispatcherTraits:
        """Each device computes its own experts; with tables tokens first move."""
        route = None if self.token_tables is None else ("tables", self.token_tables)
        return DispatcherTraits(token_route=route)

    @property
    def keeps_rows(self) -> bool:
        """Whether the backward pass finds the rows that arrived."""
        return self.experts_keep == "received"

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Send each row to the device of its expert."""
        num_local = outgoing.axes.experts_held(outgoing.num_experts)
        sent = exchange(
            outgoing.rows,
            outgoing.gates,
            outgoing.expert_ids,
            num_experts=outgoing.num_experts,
            most=outgoing.most_for_groups(num_local),
            axes=outgoing.axes,
            transport=self.transport,
        )
        return sent.dispatch_results(outgoing.weights, outgoing.none_dropped())

    def transport_choice(self) -> TransportChoice:
        """Return the transport of rows between devices and its reason."""
        return choose_transport(self.transport)

    def arriving_places(self, *, sent: float, worst: float) -> float:
        """Return the worst case of one chunk."""
        del sent
        return worst / self.num_chunks


def check_num_chunks(num_chunks: int) -> None:
    """Check the number of chunks of a dispatcher.

    Args:
        num_chunks: Value of the config field.

    Raises:
        ValueError: It is less than 1.
    """
    if num_chunks < 1:
        raise ValueError(
            f"execution.dispatcher.num_chunks={num_chunks} must be at least 1, which is all tokens"
            " at once"
        )
