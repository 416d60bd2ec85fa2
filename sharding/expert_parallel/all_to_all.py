# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-to-all dispatcher: rows travel to the device of their expert and back.

With P devices, e = E / P experts on each, T tokens and A assignments per device, of D values:

    bytes, each of there and back, forward and backward:
        ragged    sum over rows for other devices of D b           (P - 1)/P T K D b if balanced
        equal     (P - 1) C D b                                    C = min(A, T e)
    and once, in the forward pass: (P - 1) E integers, all-gathered

C is the exact worst case between two devices: a token's experts differ, so that it has at most
min(K, e) of them on any. P C rows have a place on arrival, in either transport; the experts compute
those that came. Dropless: equal to `local` up to rounding, however skewed the router is.

`num_chunks` cuts the tokens of a device into parts that are sent, computed and returned one after
the other in the program, with nothing between two of them that either must wait for: a scheduler
can compute one while another travels. Places on arrival shrink with it. How many pays:
`sharding/expert_parallel/chunks.py`. (Tutel, arXiv 2206.03382; FSMoE, arXiv 2501.10714.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.assignments import Assignments
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes
from sharding.expert_parallel.local import assigned_rows
from sharding.expert_parallel.transport import Transport, exchange


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllToAllConfig:
    """Rows travel to the device of their expert and back; none is dropped."""

    name: ClassVar[str] = "all_to_all"
    spreads_experts: ClassVar[bool] = True
    gathers_tokens: ClassVar[bool] = False

    transport: Transport | None = None
    """ragged: nothing but rows, on accelerators; equal: blocks of the worst case, everywhere; None:
    ragged where it exists."""
    num_chunks: int = 1
    """Parts of a device's tokens, one of which can travel while another is computed."""

    def __post_init__(self):
        check_num_chunks(self.num_chunks)


def check_num_chunks(num_chunks: int) -> None:
    """Refuses fewer than one.

    Args:
        num_chunks: of a dispatcher's config.

    Raises:
        ValueError: there are none.
    """
    if num_chunks < 1:
        raise ValueError(
            f"execution.dispatcher.num_chunks={num_chunks} must be at least 1, which is all tokens"
            " at once"
        )


def dispatch_all_to_all(
    x: Float[Array, "T D"],
    assignments: Assignments,
    weights: Any,
    *,
    num_experts: int,
    axes: ExpertAxes,
    config: AllToAllConfig,
) -> Dispatched:
    """Sends each row to the device of its expert.

    Args:
        x: the tokens of this device.
        assignments: of these tokens, whose experts differ.
        weights: of the experts held here.
        num_experts: E.
        axes: where experts lie.
        config: whose transport is taken.
    """
    sent = exchange(
        assigned_rows(x, assignments),
        assignments.expert_ids,
        num_experts=num_experts,
        most=most_rows(x, assignments, num_experts, axes),
        axes=axes,
        transport=config.transport,
    )
    return Dispatched(
        rows=sent.rows,
        group_sizes=sent.group_sizes,
        weights=weights,
        undo=sent.undo,
        dropped=jnp.zeros((num_experts,), jnp.float32),
    )


def most_rows(
    x: Float[Array, "T D"], assignments: Assignments, num_experts: int, axes: ExpertAxes
) -> int:
    """C: the most that these tokens can have for one device.

    Args:
        x: the tokens of this device.
        assignments: of these tokens, whose experts differ.
        num_experts: E.
        axes: where experts lie.
    """
    return min(assignments.expert_ids.shape[0], x.shape[0] * axes.experts_held(num_experts))
