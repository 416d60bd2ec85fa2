# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Asks a scaling policy from time to time, and changes which instances take requests.

What differs between a simulator and an engine, devices and power, is left to subclasses.
"""

from __future__ import annotations

import abc
import math
from typing import Any

from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.scaling import ScalingConfig, ScalingView, Wanted
from jaxmoe.serve.requests import Request


class FleetScaling(abc.ABC):
    """A policy, what it may see of a fleet, and what it has changed.

    Instances that drain end what they have, and are the first to return.
    """

    most_chips: float = math.inf
    """Devices of an instance at most."""

    def __init__(self, fleet: Fleet, config: ScalingConfig, now: float = 0.0):
        """Open the first instances.

        Args:
            fleet: All instances.
            config: Policy.
            now: Seconds on the fleet's clock.
        """
        self.interval = config.seconds
        """Seconds between two decisions; infinite for none."""
        self.changes: list[tuple[float, int, int]] = []
        """Time, instances that take requests, and devices of each, after each change."""
        self._fleet, self._scaler = fleet, config.build()
        self._arrived: list[Request] = []
        self._decided = now
        self._is_changing = False
        fleet.num_open = config.first(len(fleet.instances))
        self._state = fleet.num_open, self.num_chips

    @property
    @abc.abstractmethod
    def hardware(self) -> Any:
        """`Hardware` of an instance as it is; None if it is not known."""

    @property
    @abc.abstractmethod
    def num_chips(self) -> int:
        """Devices of an instance."""

    @abc.abstractmethod
    def power(self, now: float) -> tuple[float, float]:
        """Return the mean power since the last decision and the peak power of all; 0 if unknown.

        Args:
            now: Seconds on the fleet's clock.
        """

    @abc.abstractmethod
    def carry_out(self, now: float, decision: Wanted) -> None:
        """Change clocks and devices, where they have not been changed already.

        Args:
            now: Seconds on the fleet's clock.
            decision: Decision of the policy.
        """

    def arrive(self, request: Request) -> None:
        """Count a request for the next decision."""
        if math.isfinite(self.interval):
            self._arrived.append(request)

    def decide(self, now: float) -> Wanted | None:
        """Ask the policy; None while an earlier decision is carried out.

        Args:
            now: Seconds on the fleet's clock.

        Returns:
            What the fleet is to have; `change` has to follow.
        """
        watts, peak = self.power(now)
        arrived = tuple(self._arrived)
        self._arrived = []
        seconds = now - self._decided
        self._decided = now
        if self._is_changing:
            return None
        self._is_changing = True
        return self._scaler(
            ScalingView(
                fleet=self._fleet.view(now),
                arrived=arrived,
                seconds=seconds,
                watts=watts,
                peak_watts=peak,
                hardware=self.hardware,
                num_chips=self.num_chips,
                num_instances=len(self._fleet.instances),
                most_chips=self.most_chips,
            )
        )

    def change(self, now: float, decision: Wanted) -> None:
        """Do what was decided.

        Args:
            now: Seconds on the fleet's clock.
            decision: Decision of the policy.
        """
        self._is_changing = False
        if decision.instances is not None:
            self._fleet.num_open = decision.instances
        self.carry_out(now, decision)
        state = self._fleet.num_open, self.num_chips
        if state != self._state:
            self._state = state
            self.changes.append((now, *state))
