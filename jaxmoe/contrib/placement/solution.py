# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of the placement solvers, their result, and the check of their time limit."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from jaxmoe.routing.telemetry.trace import RoutingTrace
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


class Placer(abc.ABC):
    """Solver that places the experts of each layer on devices."""

    __slots__ = ()

    name: ClassVar[str]
    """Name in configs and flags."""

    @abc.abstractmethod
    def solve(self, trace: RoutingTrace, num_devices: int) -> Solution:
        """Return a placement with the cost that the solver minimises.

        Args:
            trace: Routing trace.
            num_devices: Devices that share the experts of a layer.

        Raises:
            ValueError: The experts do not divide by the devices, or the trace lacks what the solver
                reads.
        """


def check_time_limit(seconds: float) -> None:
    """Refuse a time limit that is negative or not finite.

    Raises:
        ValueError: The time limit is out of range.
    """
    if not 0.0 <= seconds < float("inf"):
        raise ValueError(
            f"placer.time_limit_s={seconds} must be finite, and 0 (greedy alone) or more"
        )
