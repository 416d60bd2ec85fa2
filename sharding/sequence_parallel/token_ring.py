# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token ring: keys and values stay, queries travel, and their results return the other way.

For the schedule and the bytes see `pallas_kernels.token_ring_attention`. It is for models with as
many key heads as query heads, on links with full bandwidth in both directions at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from jaxtyping import Array

from pallas_kernels import token_ring_attention
from pallas_kernels.ring.step import Transport
from pallas_kernels.sequence_layout import SequenceLayout
from pallas_kernels.token_ring_attention.schedule import Form, TokenRingSchedule, Visits
from sharding.sequence_parallel.all_gather import observe_gathered
from sharding.sequence_parallel.form import HeldAttention, RingForm, RingMessage
from sharding.sequence_parallel.local_attention import Seen
from sharding.sequence_parallel.ring import out_and_sums, ring_arguments
from sharding.sequence_parallel.sizes import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenRingConfig(RingForm):
    """Queries travel one way, their results the other."""

    name: ClassVar[str] = "token_ring"

    layout: SequenceLayout = "zigzag"
    """Which tokens a device holds: the r-th of N pieces, the first and last of 2N alike, or those
    of every document."""
    form: Form = "direct"
    """How results return: directly, over several devices at once, for full-mesh links; or from
    neighbour to neighbour behind the queries, for rings and tori."""
    transport: Transport = "ppermute"
    """How queries and results travel: XLA's collectives; or messages of a Pallas kernel, on a
    TPU."""

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of the queries held here, which visit every device."""
        arguments = ring_arguments(self, inputs, inputs.cut.ring_axis(self))
        result = token_ring_attention(*inputs[:3], form=self.form, **arguments)
        out, sums = out_and_sums(result, inputs)
        return out, observe_gathered(inputs, self) | sums

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        visits: Visits = "every"
        if sizes.is_causal:
            visits = "later" if self.layout == "contiguous" else "halves"
        schedule = TokenRingSchedule(ranks=sizes.ranks, visits=visits, form=self.form)
        rows = sizes.local_tokens * sizes.local_heads / len(schedule.pieces)
        width = sizes.head_dim
        itemsize = sizes.itemsize
        is_running = self.form == "co_travelling"
        if is_backward:
            out = 2 * width * itemsize + 8
            back = 4 * width
        else:
            out = width * itemsize
            back = width * (4 if is_running else itemsize) + 4
        for step in range(sizes.ranks):
            for piece in schedule.pieces:
                yield RingMessage(rows * out, schedule.hop(step, piece))
                yield RingMessage(rows * back, schedule.homeward(step, piece))
