# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Group-limited selection: a token's experts come from few groups, hence from few devices.

The E experts form G equal groups of consecutive ids. A group's score for a token is the sum of its
m best preferences; only experts of the M best groups can be chosen.

Sources: DeepSeek-V2 (arXiv 2405.04434, section 2.1.3: m = 1) and V3 (arXiv 2412.19437, section
2.1.2: m = K / M).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupLimitConfig:
    """Limits the experts of a token to few groups of consecutive experts."""

    name: ClassVar[str] = "group_limit"

    num_groups: int = 8
    """Number G of equal groups of consecutive experts."""
    top_groups: int = 4
    """Number M of groups that a token may use."""
    best_per_group: int | None = None
    """Number m of best preferences whose sum is a group's score; max(1, K / M) when None."""

    def __post_init__(self):
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"groups.top_groups={self.top_groups} must lie between 1 and"
                f" groups.num_groups={self.num_groups}"
            )
        if self.best_per_group is not None and self.best_per_group < 1:
            raise ValueError(f"groups.best_per_group={self.best_per_group} must be at least 1")

    def check(self, *, num_experts: int, top_k: int) -> None:
        """Check that the limit can be met with E experts and K per token.

        Raises:
            ValueError: it cannot.
        """
        if num_experts % self.num_groups:
            raise ValueError(
                f"groups.num_groups={self.num_groups} must divide num_experts={num_experts}:"
                " choose a divisor"
            )
        size = num_experts // self.num_groups
        if self.top_groups * size < top_k:
            raise ValueError(
                f"groups.top_groups={self.top_groups} groups of {size} experts hold fewer than"
                f" top_k={top_k}: raise top_groups to {-(-top_k // size)} or lower top_k"
            )
        if self.best_per_group is not None and self.best_per_group > size:
            raise ValueError(
                f"groups.best_per_group={self.best_per_group} must not exceed the {size} experts"
                " of a group"
            )


def limit_groups(
    preference: Float[Array, "T E"], config: GroupLimitConfig, *, top_k: int
) -> Float[Array, "T E"]:
    """Return the preference, with -inf for the experts of groups that a token may not use.

    Args:
        preference: Criterion of the choice, f32.
        config: Limit, checked against E and K.
        top_k: K.
    """
    num_tokens, num_experts = preference.shape
    size = num_experts // config.num_groups
    best = config.best_per_group or min(max(1, top_k // config.top_groups), size)
    grouped = preference.reshape(num_tokens, config.num_groups, size)
    scores = jax.lax.top_k(grouped, best)[0].sum(-1)
    _, chosen = jax.lax.top_k(scores, config.top_groups)
    groups = jnp.arange(config.num_groups, dtype=chosen.dtype)
    is_chosen = (chosen[:, :, None] == groups[None, None, :]).any(1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)
