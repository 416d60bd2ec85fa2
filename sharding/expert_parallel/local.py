# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The local dispatcher: every device computes all experts for its own tokens.

Expert weights are gathered to each device before use (fully sharded data parallelism); no token
travels. Dropless, and the right choice on one device and for small models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Array, Float

from sharding.assignments import Assignments, combine
from sharding.expert_parallel.permute import permute_rows, repeat_tokens, sort_by_expert

LocalExperts = Callable[[Float[Array, "R D"], Array], Float[Array, "R D"]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig:
    """All experts on every device; tokens stay where they are."""

    name: ClassVar[str] = "local"

    def expert_axis(self) -> str | None:
        """Logical axis of the expert dimension of the weights inside the island."""
        return None


def dispatch_locally(
    x: Float[Array, "T D"],
    assignments: Assignments,
    experts: LocalExperts,
    num_experts: int,
) -> Float[Array, "T D"]:
    """Sorts the assigned rows by expert, applies the experts, puts them back and combines.

    Args:
        x: the tokens of this device.
        assignments: of these tokens.
        experts: (rows sorted by expert, group sizes [E]) -> outputs; rows past the groups give 0.
        num_experts: E.
    """
    order = sort_by_expert(assignments.expert_ids, num_experts)
    if assignments.top_k is not None:
        rows = repeat_tokens(x, assignments.top_k)
    else:
        rows = x[assignments.token_ids]
    rows = permute_rows(rows, order.order, order.inverse)
    outputs = experts(rows, order.group_sizes)
    outputs = permute_rows(outputs, order.inverse, order.order)
    return combine(outputs, assignments, x.shape[0])
