# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Spreads the experts of every instance over twice or half the devices by the load.

Source: ElasticMoE (arXiv:2510.02613), our reading: scaling is vertical. The next mesh has twice the
devices and half the experts on each; sequences and their pages stay, the instance serves on while
the weights travel, and the time of it is that of their bytes. The number of pages stays what the
first devices hold, as in an engine, whose programs are compiled for it; there are never fewer.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.scaling.base import Need, RateScalingConfig, Scaler, ScalingView, Wanted


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ElasticExpertsConfig(RateScalingConfig):
    """Twice or half the devices of an instance."""

    name: ClassVar[str] = "elastic_experts"

    most: int = 8
    """Devices of an instance at most."""

    def __post_init__(self) -> None:
        super(ElasticExpertsConfig, self).__post_init__()
        if self.most < 1:
            raise ValueError(f"scaling.most={self.most} must be at least 1")

    @property
    def needs(self) -> tuple[Need, ...]:
        """What a policy of rates needs; and layouts on other numbers of devices."""
        return (*super(ElasticExpertsConfig, self).needs, "layouts")

    def first(self, num_instances: int) -> int:
        """Return all instances."""
        return num_instances

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        least = 0

        def decide(view: ScalingView) -> Wanted:
            nonlocal least
            least = least or view.num_chips
            chips = view.num_chips
            rate = view.rate / len(view.fleet.members)

            def is_enough(number: int) -> bool:
                return rate <= self.rate(view.hardware.on_chips(number), view)

            following = chips
            if not is_enough(chips) and 2 * chips <= min(self.most, view.most_chips):
                following = 2 * chips
            elif chips > least and is_enough(chips // 2):
                following = chips // 2
            delay = view.hardware.resharding_seconds(following)
            return Wanted(num_chips=following, delay=delay)

        return decide
