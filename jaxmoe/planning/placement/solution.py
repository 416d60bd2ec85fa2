# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What every solver returns, and what their configs check alike."""

from __future__ import annotations

import dataclasses

from sharding.expert_parallel.placement import ExpertPlacement


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A placement and how good it is known to be."""

    placement: ExpertPlacement
    found_by: str
    """Which of the solver's candidates this is."""
    cost: float
    """What the solver minimises."""
    gap: float | None
    """How far the cost may lie above the least one, as a share of it; None: nobody knows."""
    seconds: float


def check_time_limit(seconds: float) -> None:
    """Refuses a time limit that is none.

    Raises:
        ValueError: naming the field.
    """
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(
            f"placer.time_limit_s={seconds} must be finite, and 0 (greedy alone) or more"
        )
