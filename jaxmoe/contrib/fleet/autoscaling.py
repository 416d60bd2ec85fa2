# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lets a scaling policy change the instances of an engine, in the engine's thread."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.fleet.fleet_scaling import FleetScaling
from jaxmoe.contrib.fleet.resharding import BusyError, Resharder
from jaxmoe.contrib.fleet.scaling import ScalingConfig, Wanted
from jaxmoe.contrib.fleet.scaling.base import Need

logger = logging.getLogger(__name__)


class EngineScaling(FleetScaling):
    """Instances that take requests, and their meshes.

    Every instance has its weights, so that it joins at once; one that has drained keeps its
    devices. A change of devices is compiled while the instances serve.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: ScalingConfig,
        *,
        hardware: Any,
        resharder: Resharder,
        has_layouts: bool,
        clock: Callable[[], float],
        post: Callable[[Callable[[], None]], None],
    ):
        """Open the first instances.

        Args:
            fleet: All instances.
            config: Policy.
            hardware: Times of a step, as `Hardware`; None if they are not known.
            resharder: Changes meshes.
            has_layouts: Whether it can.
            clock: Seconds for the policy.
            post: Runs a function later in the thread that owns the fleet.

        Raises:
            ValueError: The policy needs what is missing.
        """
        is_missing: dict[Need, bool] = {
            "power": True,
            "hardware": hardware is None,
            "layouts": not has_layouts,
        }
        config.check(roles=fleet.roles, lacks=[need for need in is_missing if is_missing[need]])
        self._times = hardware
        self._resharder = resharder
        self._is_elastic = "layouts" in config.needs
        self._has_mesh = has_layouts and "hardware" in config.needs
        self._clock = clock
        self._post = post
        super().__init__(fleet, config, clock())
        self._next = clock() + self.interval
        if self._is_elastic:
            resharder.check(resharder.mesh)  # in words where no change is possible at all
            self.most_chips = resharder.most_chips
            if self.most_chips == self.num_chips:
                raise ValueError(
                    f"scaling={config.name!r} finds no mesh to grow to: an instance has"
                    f" {self.num_chips} devices, and twice as many are not there, or do not divide"
                    " the experts: begin with a smaller mesh, or choose scaling 'fixed'"
                )

    @property
    def hardware(self) -> Any:
        """Times of an instance on its devices; as given where its mesh cannot change."""
        return self._times.on_chips(self.num_chips) if self._has_mesh else self._times

    @property
    def num_chips(self) -> int:
        """Devices of an instance; 1 where no policy asks."""
        return math.prod(self._resharder.mesh.sizes) if self._has_mesh else 1

    def power(self, now: float) -> tuple[float, float]:
        """Return zeros: an engine measures no power."""
        del now
        return 0.0, 0.0

    def carry_out(self, now: float, decision: Wanted) -> None:
        """Change nothing: devices have been changed, and an engine sets no clocks."""
        del now, decision

    def turn(self) -> float | None:
        """Decide when it is time.

        Returns:
            Seconds until the next decision; None if there is none.
        """
        if math.isinf(self.interval):
            return None
        now = self._clock()
        if now >= self._next:
            self._next += self.interval * (1 + (now - self._next) // self.interval)
            if (decision := self.decide(now)) is not None:
                self._begin(now, decision)
        return self._next - now

    def _begin(self, now: float, decision: Wanted) -> None:
        """Carry a decision out, at once or when new programs are compiled."""
        if (number := decision.num_chips) is None:
            self.change(now, decision)
            return
        mesh = self._resharder.of_size(number)
        present = self.num_chips
        if self._resharder.is_on(mesh):
            self.change(now, decision)
            return
        try:
            done = self._resharder.begin(mesh)
        except (ValueError, BusyError) as error:
            logger.warning("no change to %d devices: %s", number, error)
            self.change(now, decision)
            return

        def end(done: Future[Any]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.warning("no change to %d devices: %r", number, error)
                if number > present:  # there may be no memory for it
                    self.most_chips = present
            self.change(self._clock(), decision)

        done.add_done_callback(lambda done: self._post(lambda: end(done)))
