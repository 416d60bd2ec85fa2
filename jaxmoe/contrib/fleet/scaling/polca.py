# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Caps the clocks of instances when their power comes near a budget, those of low priority first.

Source: POLCA (arXiv:2308.12908). More instances share a power budget than it feeds at the peak:

    above 80 % of the budget    instances of low priority to the first clock
    above 89 %                  those to the second, the others to the third
    above 100 %                 all to the brake, until the next decision

A level ends when the power is 5 % of the budget below its threshold, one at a decision. Thresholds
and clocks (of an A100: 1275, 1110, 1305 and 288 of 1410 MHz) are fields and were not verified. An
instance has low priority while no request on it has a priority above 0.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.contrib.fleet.scaling.base import Need, Scaler, ScalingConfig, ScalingView, Wanted
from jaxmoe.serve.view import InstanceView


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PolcaConfig(ScalingConfig):
    """Clocks by a power budget."""

    name: ClassVar[str] = "polca"

    budget: float = 0.75
    """Power budget as a share of the peak power of all instances."""
    interval: float = 2.0
    """Seconds between two decisions."""
    thresholds: tuple[float, float] = (0.80, 0.89)
    """Shares of the budget above which low and then all priorities are capped."""
    hysteresis: float = 0.05
    """Share of the budget below a threshold at which its cap ends."""
    clocks: tuple[float, float, float, float] = (0.90, 0.79, 0.93, 0.20)
    """Clocks of low priority at both thresholds, of high priority at the second, of the brake."""

    def __post_init__(self) -> None:
        low, high = self.thresholds
        for field in ("budget", "interval"):
            if not (number := getattr(self, field)) > 0:
                raise ValueError(f"scaling.{field}={number} must be positive")
        if not 0 < low < high < 1:
            raise ValueError(f"scaling.thresholds={self.thresholds} must rise within (0, 1)")
        if not 0 <= self.hysteresis < low:
            raise ValueError(
                f"scaling.hysteresis={self.hysteresis} must be at least 0 and below {low}, the"
                " first of scaling.thresholds"
            )
        if not all(0 < clock <= 1 for clock in self.clocks):
            raise ValueError(f"scaling.clocks={self.clocks} must lie in (0, 1]")

    @property
    def needs(self) -> tuple[Need, ...]:
        """Watts, and clocks to set."""
        return ("power",)

    @property
    def seconds(self) -> float:
        """Seconds between two decisions."""
        return self.interval

    def first(self, num_instances: int) -> int:
        """Return all instances."""
        return num_instances

    def build(self) -> Scaler:
        """Return the policy for one fleet."""
        level = 0

        def decide(view: ScalingView) -> Wanted:
            nonlocal level
            level = self.following(level, view.watts / (self.budget * view.peak_watts))
            first, second, third, brake = self.clocks
            low = (1.0, first, second, brake)[level]
            high = (1.0, 1.0, third, brake)[level]
            return Wanted(clocks=tuple(low if is_low(o) else high for o in view.fleet.members))

        return decide

    def following(self, level: int, power: float) -> int:
        """Return the next level, 0 (no cap) to 3 (brake).

        Args:
            level: Level now.
            power: Mean power since the last decision as a share of the budget.
        """
        borders = (*self.thresholds, 1.0)
        reached = sum(power > border for border in borders)
        if reached >= level or power > borders[level - 1] - self.hysteresis:
            return max(reached, min(level, 2))  # the brake is released at once
        return level - 1


def is_low(view: InstanceView) -> bool:
    """Return whether no request of an instance has a priority above 0."""
    first = view.waiting[:1]  # none behind it has a larger priority
    live = (*view.running, *view.busy, *first, *view.swapped)
    return all(sequence.request.priority <= 0 for sequence in live)
