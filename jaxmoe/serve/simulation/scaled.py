# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lets a scaling policy change a simulated fleet: instances join and drain, devices and clocks."""

from __future__ import annotations

from collections.abc import Callable

from jaxmoe.serve.fleet.fleet import Fleet
from jaxmoe.serve.policies.scaling import ScalingConfig, ScalingView, Wanted
from jaxmoe.serve.requests import Request
from jaxmoe.serve.simulation.cost import Roofline
from jaxmoe.serve.simulation.power import PowerMeter


class FleetScaling:
    """Costs of every instance, and which of them are on.

    An instance that joins takes power while its weights are read. One that drains ends what it has,
    is the first to return, and is off when it has nothing left.
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
        if config.changes_instances and set(fleet.roles) != {"both"}:
            raise ValueError(
                f"scaling={config.name!r} lets instances join and drain, which have roles here:"
                " choose scaling 'fixed', or a dispatch policy without roles"
            )
        self.interval = config.seconds
        self.costs = [cost] * number
        """Costs of each instance."""
        self.arrived: list[Request] = []
        """Requests since the last decision."""
        self.powers: list[float] = []
        """Mean power between the decisions, watts."""
        self.changes: list[tuple[float, int, int]] = []
        """Time, instances that take requests, and devices of each, after each change."""
        self._fleet, self._meter, self._scaler = fleet, meter, config.build()
        self._is_on = [False] * number
        self._is_changing = False
        self._joules = 0.0
        fleet.num_open = config.first(number)
        self._switch_on(0.0, fleet.num_open)

    def decide(self, now: float) -> tuple[float, Callable[[float], None]]:
        """Ask the policy.

        Args:
            now: Seconds on the simulated clock.

        Returns:
            Seconds until the change that it wants, and a function to call then with the time.
        """
        self._meter.change(now, 0.0)
        self.powers.append((self._meter.joules - self._joules) / self.interval)
        self._joules = self._meter.joules
        arrived, self.arrived = tuple(self.arrived), []
        if self._is_changing:
            return 0.0, lambda now: None
        cost, number = self.costs[0].at_clock(1.0), len(self.costs)
        wanted = self._scaler(
            ScalingView(
                fleet=self._fleet.view(now),
                arrived=arrived,
                seconds=self.interval,
                watts=self.powers[-1],
                peak_watts=number * cost.num_chips * cost.chip.peak_watts,
                hardware=cost,
                num_chips=cost.num_chips,
                num_instances=number,
            )
        )
        self._is_changing = True
        self._switch_on(now, wanted.instances or 0)
        return wanted.delay, lambda now: self._change(now, wanted)

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

    def _switch_on(self, now: float, count: int) -> None:
        for number in range(count):
            if not self._is_on[number]:
                self._is_on[number] = True
                self._meter.change(now, self.costs[number].idle_watts)

    def _change(self, now: float, wanted: Wanted) -> None:
        self._is_changing = False
        before = self._fleet.num_open, self.costs[0].num_chips
        if wanted.instances is not None:
            self._fleet.num_open = wanted.instances
        for number, clock in enumerate(wanted.clocks or ()):
            self.costs[number] = self.costs[number].at_clock(clock)
        for number, cost in enumerate(self.costs):
            if wanted.num_chips is not None:
                self.costs[number] = cost.on_chips(wanted.num_chips)
                more = self.costs[number].idle_watts - cost.idle_watts
                self._meter.change(now, more * self._is_on[number])
        after = self._fleet.num_open, self.costs[0].num_chips
        if after != before:
            self.changes.append((now, *after))
