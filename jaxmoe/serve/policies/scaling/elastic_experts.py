# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Spreads the experts of every instance over twice or half the devices by the load.

Source: ElasticMoE (arXiv:2510.02613), our reading: scaling is vertical. The next mesh has twice the
devices and half the experts on each; sequences and their pages stay, the instance serves on while
the weights travel, and the time of it is that of their bytes.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.serve.policies.scaling.base import (
    Scaler,
    ScalingConfig,
    ScalingView,
    Wanted,
    rate_within,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ElasticExpertsConfig(ScalingConfig):
    """Twice or half the devices of an instance."""

    name: ClassVar[str] = "elastic_experts"

    interval: float = 30.0
    """Seconds between two decisions."""
    most: int = 8
    """Devices of an instance at most."""
    utilization: float = 0.7
    """Share of the rate at the objective to load an instance with, for bursts."""

    def __post_init__(self) -> None:
        if not self.interval > 0 or self.most < 1 or not 0 < self.utilization <= 1:
            raise ValueError(
                f"scaling.interval={self.interval} must be positive, scaling.most={self.most} at"
                f" least 1 and scaling.utilization={self.utilization} in (0, 1]"
            )

    @property
    def seconds(self) -> float:
        """Seconds between two decisions."""
        return self.interval

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        least = 0

        def decide(view: ScalingView) -> Wanted:
            nonlocal least
            least, chips = least or view.num_chips, view.num_chips
            rate = view.rate / len(view.fleet.members)

            def is_enough(number: int) -> bool:
                hardware, facts = view.hardware.on_chips(number), view.fleet.members[0].facts
                if not view.arrived:
                    return True
                return rate <= self.utilization * rate_within(hardware, facts, view.arrived)

            following = chips
            if not is_enough(chips) and 2 * chips <= self.most:
                following = 2 * chips
            elif chips > least and is_enough(chips // 2):
                following = chips // 2
            delay = view.hardware.resharding_seconds(following)
            return Wanted(num_chips=following, delay=delay)

        return decide
