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

from jaxmoe.contrib.fleet.scaling.base import Need, RateScalingConfig, Scaler, ScalingView, Wanted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SLOConfig(RateScalingConfig):
    """Instances that the predicted rate needs."""

    name: ClassVar[str] = "slo"

    least: int = 1
    """Instances at the beginning and at least."""

    def __post_init__(self) -> None:
        super(SLOConfig, self).__post_init__()
        if self.least < 1:
            raise ValueError(f"scaling.least={self.least} must be at least 1")

    @property
    def needs(self) -> tuple[Need, ...]:
        """What a policy of rates needs; and instances that all do everything, to join and drain."""
        return (*super(SLOConfig, self).needs, "equal_roles")

    def first(self, num_instances: int) -> int:
        """Return the least instances."""
        return min(self.least, num_instances)

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        last = 0.0

        def decide(view: ScalingView) -> Wanted:
            nonlocal last
            predicted = view.rate + max(view.rate - last, 0.0)
            last = view.rate
            needed = self.least
            present = len(view.fleet.members)
            needed = max(needed, math.ceil(predicted / self.rate(view.hardware, view)))
            instances = present + (needed > present) - (needed < present)
            instances = min(instances, view.num_instances)
            joins = instances > present
            delay = view.hardware.loading_seconds() if joins else 0.0
            return Wanted(instances=instances, delay=delay)

        return decide
