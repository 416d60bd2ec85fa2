# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The local dispatcher: every device computes all experts for its own tokens.

Expert weights are gathered to each device before use (fully sharded data parallelism); no token
travels. Dropless, and the right choice on one device and for small models.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from sharding.assignments import Assignments
from sharding.expert_parallel.dispatched import Dispatched, ExpertAxes
from sharding.expert_parallel.permute import permute_rows, repeat_tokens, sort_by_expert


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig:
    """All experts on every device; tokens stay where they are."""

    name: ClassVar[str] = "local"
    spreads_experts: ClassVar[bool] = False
    """Whether each device of the expert axes computes its own experts only."""
    gathers_tokens: ClassVar[bool] = False
    """Whether the devices of the expert axes first share all their tokens."""


def dispatch_locally(
    x: Float[Array, "T D"],
    assignments: Assignments,
    weights: Any,
    *,
    num_experts: int,
    axes: ExpertAxes,
) -> Dispatched:
    """Sorts the assigned rows by expert.

    Args:
        x: the tokens of this device.
        assignments: of these tokens.
        weights: of all experts.
        num_experts: E.
        axes: none.
    """
    del axes
    order = sort_by_expert(assignments.expert_ids, num_experts)
    return Dispatched(
        rows=permute_rows(assigned_rows(x, assignments), order.order, order.inverse),
        group_sizes=order.group_sizes,
        weights=weights,
        undo=lambda outputs: permute_rows(outputs, order.inverse, order.order),
        dropped=jnp.zeros((num_experts,), jnp.float32),
    )


def assigned_rows(x: Float[Array, "T D"], assignments: Assignments) -> Float[Array, "A D"]:
    """One row per assignment, in their order."""
    if assignments.top_k is not None:
        return repeat_tokens(x, assignments.top_k)
    return x[assignments.token_ids]
