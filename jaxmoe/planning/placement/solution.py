# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Result of the placement solvers, and the check of their time limit."""

from __future__ import annotations

import dataclasses

from sharding.expert_parallel.placement import ExpertPlacement


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """A placement with its cost and gap."""

    placement: ExpertPlacement
    found_by: str
    """Name of the solver's candidate."""
    cost: float
    """Objective of the solver."""
    gap: float | None
    """Largest relative distance from the optimal cost; None if unknown."""


def check_time_limit(seconds: float) -> None:
    """Refuse a time limit that is negative or not finite.

    Raises:
        ValueError: The time limit is out of range.
    """
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(
            f"placer.time_limit_s={seconds} must be finite, and 0 (greedy alone) or more"
        )
