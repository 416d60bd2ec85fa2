# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ring: queries stay, keys and values travel from device to device behind the arithmetic.

For the schedule and the bytes see `pallas_kernels.ring_attention`. It suits few key heads, and any
number of devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar

from jaxtyping import Array

from pallas_kernels import ring_attention
from pallas_kernels.ring_attention.api import Directions, Transport
from pallas_kernels.ring_attention.schedule import Form, make_schedule
from pallas_kernels.sequence_layout import SequenceLayout
from sharding.sequence_parallel.all_gather import observe_gathered
from sharding.sequence_parallel.form import HeldAttention, RingForm, RingMessage
from sharding.sequence_parallel.local_attention import Seen
from sharding.sequence_parallel.sizes import AttentionSizes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RingConfig(RingForm):
    """Keys and values travel."""

    name: ClassVar[str] = "ring"

    layout: SequenceLayout = "zigzag"
    """Which tokens a device holds: the r-th of N pieces, the first and last of 2N alike, or those
    of every document."""
    directions: Directions = "one"
    """Direction of travel: all heads one way, or half of them each way, for links with full
    bandwidth in both directions at once."""
    transport: Transport = "ppermute"
    """How keys and values travel: XLA's collectives; or messages of a Pallas kernel, on a TPU."""

    def check_heads(self, sizes: AttentionSizes) -> None:
        """Check that both directions have as many key heads, and the same way to go.

        Raises:
            ValueError: They have not.
        """
        where = "execution.sequence_parallel.directions='both'"
        if self.directions == "both" and sizes.local_kv_heads % 2:
            raise ValueError(
                f"{where} sends half of the key heads of a device each way, and it has"
                f" {sizes.local_kv_heads}: set it to 'one', or choose heads and mesh.tensor that"
                " leave an even number"
            )
        if self.directions == "both" and self._schedule_form(sizes)[0] == "near":
            raise ValueError(
                f"{where} with model.attention.window={sizes.window} on layout 'contiguous': what a"
                " query sees is on one side of it: set it to 'one', or layout to zigzag"
            )

    def attend(self, inputs: HeldAttention) -> tuple[Array, Seen]:
        """Return attention of the queries held here to keys that pass by."""
        out, sums = self.attend_along(inputs, axis=inputs.cut.ring_axis(self))
        return out, observe_gathered(inputs, self) | sums

    def attend_along(
        self, inputs: HeldAttention, *, axis: str | tuple[str, ...]
    ) -> tuple[Array, Seen]:
        """Return the output of the ring alone, and the log-sum-exp where the rules keep it.

        Args:
            inputs: Arrays of this device; positions None: as the layout has it.
            axis: Mesh axis of the ring, or several that form one, the slowest first.
        """
        arguments = ring_arguments(self, inputs, axis)
        result = ring_attention(*inputs[:3], directions=self.directions, **arguments)
        return out_and_sums(result, inputs)

    def _messages(self, sizes: AttentionSizes, is_backward: bool) -> Iterator[RingMessage]:
        form, reach = self._schedule_form(sizes)
        schedule = make_schedule(sizes.ranks, form, directions=self.directions, reach=reach)
        values = sizes.local_tokens * sizes.local_kv_heads * 2 * sizes.head_dim
        values /= schedule.pieces * len(schedule.routes)
        for route in schedule.routes:
            for step in route.steps:
                for hop in step.keys:
                    yield RingMessage(values * sizes.itemsize, hop.pairs)
                for hop in step.gradients if is_backward else ():
                    yield RingMessage(values * 4, hop.pairs)

    def _schedule_form(self, sizes: AttentionSizes) -> tuple[Form, int | None]:
        """Return the form of the kernel's schedule, and how many ranks back keys are needed."""
        if not sizes.is_causal:
            return "all", None
        if self.layout != "contiguous":
            return ("halves" if sizes.window is None else "all"), None
        if sizes.window is None:
            return "earlier", None
        local_length = sizes.length // sizes.ranks
        return "near", min(sizes.ranks - 1, math.ceil((sizes.window - 1) / local_length))


def ring_arguments(form: Any, inputs: HeldAttention, axis: str | tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments that `ring_attention` and `token_ring_attention` share.

    Args:
        form: Either ring; its layout and transport are read.
        inputs: Arrays of this device.
        axis: Mesh axis of the ring.
    """
    rules = inputs.rules
    return {
        "axis_name": axis,
        "causal": rules.is_causal,
        "layout": form.layout,
        "positions": inputs.tokens.positions,
        "segment_ids": inputs.tokens.segment_ids,
        "window": rules.window,
        "softcap": rules.softcap,
        "scale": rules.scale,
        "transport": form.transport,
        "implementation": rules.implementation,
        "returns_lse": rules.keeps_lse,
    }


def out_and_sums(result: Any, inputs: HeldAttention) -> tuple[Array, Seen]:
    """Return the output of a ring, and the log-sum-exp where the rules keep it.

    Args:
        result: Result of the kernel with `ring_arguments`.
        inputs: Arrays of this device.
    """
    if not inputs.rules.keeps_lse:
        return result, {}
    out, lse = result
    return out, {"lse": lse}
