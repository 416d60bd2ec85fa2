# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The all-gather dispatcher: every device sees all tokens and computes those of its own experts.

The devices of `ExpertAxes.expert` and `expert_tensor`, P in all, share their T tokens before and
add up their sums afterwards; both are in the seam. Here nothing travels. Each device receives

    (P - 1) T (D values + 2 K numbers)     tokens, ids and gates, all-gathered
    (P - 1) T D values                     sums, reduce-scattered

and as much in the backward pass, whatever the router does: K does not count, nor does imbalance.
An all-to-all moves (P - 1)/P K T D values each way, less where P > K. Dropless. The rows of one
device are in the worst case P T min(K, e) with e = E / P experts, and that many have a place.

To choose it: few devices that are close, a large K, or routing so uneven that others lose more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.assignments import Assignments
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes
from sharding.expert_parallel.local import assigned_rows
from sharding.expert_parallel.permute import move_rows, sort_by_expert


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllGatherConfig:
    """Tokens are gathered to the experts, sums are scattered back."""

    name: ClassVar[str] = "all_gather"
    spreads_experts: ClassVar[bool] = True
    gathers_tokens: ClassVar[bool] = True


def dispatch_gathered(
    x: Float[Array, "T D"],
    assignments: Assignments,
    weights: Any,
    *,
    num_experts: int,
    axes: ExpertAxes,
) -> Dispatched:
    """Sorts, of the rows of all devices, those of the experts held here.

    Args:
        x: the tokens of all devices of `axes`.
        assignments: of these tokens, whose experts differ.
        weights: of the experts held here.
        num_experts: E.
        axes: where experts lie.
    """
    held = axes.experts_held(num_experts)
    mine = assignments.expert_ids.astype(jnp.int32) - jax.lax.axis_index(axes.expert) * held
    order = sort_by_expert(jnp.where((mine >= 0) & (mine < held), mine, held), held)
    # A token's experts differ: no more of its rows are read here than there are experts.
    most = min(mine.shape[0], x.shape[0] * held)
    read = order.group_sizes.sum()
    places = jnp.arange(most, dtype=jnp.int32)
    sources = jnp.where(places < read, order.order[:most], mine.shape[0])
    targets = jnp.where(order.inverse < read, order.inverse, most)
    return Dispatched(
        rows=move_rows(assigned_rows(x, assignments), sources, targets),
        group_sizes=order.group_sizes,
        weights=weights,
        undo=lambda outputs: move_rows(outputs, targets, sources),
        dropped=jnp.zeros((num_experts,), jnp.float32),
    )
