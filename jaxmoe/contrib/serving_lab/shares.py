# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps that have a share of the device, or are cut into parts that overlap."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.serve.draft import Draft
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.plan import Lane, Plan, PlanError
from jaxmoe.serve.step import EngineStep


@dataclasses.dataclass(frozen=True, slots=True)
class SharedLane(Lane):
    """Work that runs beside that of other lanes."""

    share: float = 1.0
    """Share of the device that the lane may use."""
    nano_batches: int = 1
    """Parts into which the step is cut, so that compute, memory and network overlap."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SharedStep(EngineStep):
    """One lane of a plan, as the simulator computes its time."""

    share: float = 1.0
    """Share of the device."""
    nano_batches: int = 1
    """Parts into which the step is cut."""


class SharedInstance(Instance):
    """Requests of one simulated instance."""

    step_type: ClassVar[type[EngineStep]] = SharedStep

    def start(self, plan: Plan, now: float) -> tuple[EngineStep, ...]:
        """Check the shares of a plan too, and start its steps."""
        for lane in plan.lanes:
            if isinstance(lane, SharedLane) and not 0 < lane.share <= 1:
                raise PlanError(self.policy, "share", f"share={lane.share} of lane {lane.number}")
        return super().start(plan, now)

    def _step(self, lane: Lane) -> EngineStep:
        step = super()._step(lane)
        if not isinstance(lane, SharedLane):
            return step
        return dataclasses.replace(step, share=lane.share, nano_batches=lane.nano_batches)


class SharedDraft(Draft):
    """A plan under construction whose lanes have shares."""

    def shared_plan(self, shares: dict[int, float] | None = None, nano_batches: int = 1) -> Plan:
        """Return the plan.

        Args:
            shares: Share of the device by lane; all of it by default.
            nano_batches: Parts into which the step is cut.
        """
        plan = self.plan()
        share = shares or {}
        lanes = tuple(
            SharedLane(
                lane.singles, lane.pieces, lane.number, share.get(lane.number, 1.0), nano_batches
            )
            for lane in plan.lanes
        )
        return dataclasses.replace(plan, lanes=lanes)
