# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lets instances join and drain by the rate that one serves within the objective.

Source: the autoscaler of AIBrix (arXiv:2504.03648), our reading: instances = predicted rate / rate
of one instance at the objective, by at most one instance a decision. The predicted rate is that of
the last interval and, while it rises, its last rise. An instance joins when its weights are read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.serve.policies.scaling.base import (
    Scaler,
    ScalingConfig,
    ScalingView,
    Wanted,
    rate_within,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SLOConfig(ScalingConfig):
    """Instances that the predicted rate needs."""

    name: ClassVar[str] = "slo"
    changes_instances: ClassVar[bool] = True

    interval: float = 60.0
    """Seconds between two decisions."""
    least: int = 1
    """Instances at the beginning and at least."""
    utilization: float = 0.7
    """Share of the rate at the objective to load an instance with, for bursts."""

    def __post_init__(self) -> None:
        if not self.interval > 0 or self.least < 1 or not 0 < self.utilization <= 1:
            raise ValueError(
                f"scaling.interval={self.interval} must be positive, scaling.least={self.least} at"
                f" least 1 and scaling.utilization={self.utilization} in (0, 1]"
            )

    @property
    def seconds(self) -> float:
        """Seconds between two decisions."""
        return self.interval

    def first(self, num_instances: int) -> int:
        """Return the least instances."""
        return min(self.least, num_instances)

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        last = 0.0

        def decide(view: ScalingView) -> Wanted:
            nonlocal last
            predicted, last = view.rate + max(view.rate - last, 0.0), view.rate
            needed, present = self.least, len(view.fleet.members)
            if view.arrived:
                facts = view.fleet.members[0].facts
                one = self.utilization * rate_within(view.hardware, facts, view.arrived)
                needed = max(needed, math.ceil(predicted / one))
            instances = present + (needed > present) - (needed < present)
            instances = min(instances, view.num_instances)
            joins = instances > present
            delay = view.hardware.loading_seconds() if joins else 0.0
            return Wanted(instances=instances, delay=delay)

        return decide
