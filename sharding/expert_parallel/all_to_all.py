# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-to-all dispatcher: rows travel to the device of their expert and back.

With P devices, e = E / P experts on each, T tokens and A assignments per device, rows of D values
of b bytes:

    bytes sent, each way, forward and backward:
        ragged    D b for each row of another device           (P - 1)/P T K D b if balanced
        equal     (P - 1) C D b                                C = min(A, T e)
    and once, in the forward pass: (P - 1) E integers, all-gathered

C is the exact worst case between two devices: the experts of a token differ, so at most min(K, e)
of them are on one device. P C rows are allocated on arrival with either transport. Dropless: equal
to `local` up to rounding for any routing.

`num_chunks` cuts the tokens of a device into parts that are sent, computed and returned one after
the other in the program, without dependencies between them: a scheduler can compute one while
another travels. Memory on arrival shrinks with it. For the number that pays see
`sharding/expert_parallel/chunks.py`. (Tutel, arXiv 2206.03382; FSMoE, arXiv 2501.10714.)

`token_tables` first moves the tokens to the devices where their experts probably are, for the bytes
in `sharding/expert_parallel/token_shuffle.py`. Exact for any tables. (Speculative MoE, arXiv
2503.04398.)
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Bool, Int

from sharding.expert_parallel.dispatched import Dispatched, Outgoing
from sharding.expert_parallel.dispatcher import Dispatcher
from sharding.expert_parallel.token_shuffle import TokenOrder, order_tokens
from sharding.expert_parallel.token_tables import load_tables
from sharding.expert_parallel.transport import (
    Transport,
    TransportChoice,
    choose_transport,
    exchange,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllConfig(Dispatcher):
    """Rows travel to the device of their expert and back; none is dropped."""

    name: ClassVar[str] = "all_to_all"

    transport: Transport | None = None
    """ragged: only rows, on accelerators; equal: blocks of the worst case, everywhere; None:
    ragged where it exists."""
    num_chunks: int = 1
    """Parts of a device's tokens, one of which can travel while another is computed."""
    token_tables: str | None = None
    """File of `experiments.place --tables`, the same on every host, by which tokens first move to
    the device that probably holds their experts; None: they stay."""

    def __post_init__(self):
        check_num_chunks(self.num_chunks)

    @property
    def chunks(self) -> int:
        """Parts of a device's tokens that are sent, computed and returned one after the other."""
        return self.num_chunks

    @property
    def moves_tokens(self) -> bool:
        """Tokens first move to the device that probably holds their experts."""
        return self.token_tables is not None

    def order_tokens(
        self,
        layer: Int[Array, ""],
        token_ids: Int[Array, " T"],
        token_mask: Bool[Array, " T"],
        below: Int[Array, " T"],
        num_devices: int,
    ) -> TokenOrder:
        """Return the order of the tokens by the tables of their layer."""
        assert self.token_tables is not None
        tables = load_tables(self.token_tables).of_layer(layer)
        return order_tokens(tables, token_ids, token_mask, below, num_devices)

    def check_model(
        self, *, num_devices: int, num_layers: int, num_experts: int, vocab_size: int
    ) -> None:
        """Check that the tables are those of this model on so many devices."""
        if self.token_tables is None or num_devices == 1:
            return
        required = {
            "num_devices": num_devices,
            "num_layers": num_layers,
            "num_experts": num_experts,
            "vocab_size": vocab_size,
        }
        load_tables(self.token_tables).check(self.token_tables, required)

    def dispatch(self, outgoing: Outgoing) -> Dispatched:
        """Send each row to the device of its expert."""
        num_local = outgoing.axes.experts_held(outgoing.num_experts)
        sent = exchange(
            outgoing.rows,
            outgoing.expert_ids,
            num_experts=outgoing.num_experts,
            most=outgoing.most_for_groups(num_local),
            axes=outgoing.axes,
            transport=self.transport,
        )
        return sent.dispatched(outgoing.weights, outgoing.none_dropped())

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
