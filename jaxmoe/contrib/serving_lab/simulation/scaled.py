# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Costs and power of a simulated fleet that a scaling policy changes."""

from __future__ import annotations

from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.fleet_scaling import FleetScaling
from jaxmoe.contrib.fleet.scaling import ScalingConfig, Wanted
from jaxmoe.contrib.serving_lab.simulation.cost import Roofline
from jaxmoe.contrib.serving_lab.simulation.power import PowerMeter


class SimulatedScaling(FleetScaling):
    """Costs of every instance, and which of them are on.

    An instance that joins takes power while its weights are read; one that drains is off when it
    has nothing left.
    """

    def __init__(self, fleet: Fleet, cost: Roofline, config: ScalingConfig, meter: PowerMeter):
        """Switch the first instances on.

        Args:
            fleet: All instances.
            cost: Costs of each at the beginning.
            config: Policy.
            meter: Energy of the fleet.

        Raises:
            ValueError: Instances with roles cannot join and drain.
        """
        number = len(fleet.instances)
        config.check(roles=fleet.roles)
        self.costs = [cost] * number
        """Costs of each instance."""
        self.powers: list[float] = []
        """Mean power between the decisions, watts."""
        self._meter = meter
        self._joules = 0.0
        self._is_on = [False] * number
        super().__init__(fleet, config)
        self.switch_on(0.0, fleet.num_open)

    @property
    def hardware(self) -> Roofline:
        """Costs of an instance at the full clock."""
        return self.costs[0].at_clock(1.0)

    @property
    def num_chips(self) -> int:
        """Devices of an instance."""
        return self.costs[0].num_chips

    def power(self, now: float) -> tuple[float, float]:
        """Return the mean power since the last decision and that of all at the peak."""
        self._meter.change(now, 0.0)
        self.powers.append((self._meter.joules - self._joules) / self.interval)
        self._joules = self._meter.joules
        peak = len(self.costs) * self.num_chips * self.costs[0].chip.peak_watts
        return self.powers[-1], peak

    def carry_out(self, now: float, decision: Wanted) -> None:
        """Change clocks and devices."""
        for number, clock in enumerate(decision.clocks or ()):
            self.costs[number] = self.costs[number].at_clock(clock)
        for number, cost in enumerate(self.costs):
            if decision.num_chips is not None:
                self.costs[number] = cost.on_chips(decision.num_chips)
                more = self.costs[number].idle_watts - cost.idle_watts
                self._meter.change(now, more * self._is_on[number])

    def switch_off(self, now: float) -> None:
        """Switch instances off that have drained.

        Args:
            now: Seconds on the simulated clock.
        """
        for number in range(self._fleet.num_open, len(self._is_on)):
            instance = self._fleet.instances[number]
            is_joining = self._is_changing
            if self._is_on[number] and instance.is_idle and not (instance.incoming or is_joining):
                self._is_on[number] = False
                self._meter.change(now, -self.costs[number].idle_watts)

    def switch_on(self, now: float, count: int) -> None:
        """Switch the first instances on, those that join while their weights are read too.

        Args:
            now: Seconds on the simulated clock.
            count: Instances.
        """
        for number in range(count):
            if not self._is_on[number]:
                self._is_on[number] = True
                self._meter.change(now, self.costs[number].idle_watts)
