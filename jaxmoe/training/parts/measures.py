# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of every step that measure it: routers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.routing import telemetry
from jaxmoe.training.parts.base import Outcome, StepPart

if TYPE_CHECKING:
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterMeasures(StepPart):
    """Load of the experts and scalars of the routers."""

    name: ClassVar[str] = "router_measures"

    def measure(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        """Return `router` and `load`."""
        del step
        statistics = outcome.gradients.summed.statistics
        if statistics is None:
            return {"router": {}, "load": None}
        scalars = telemetry.summarise(statistics)
        scalars |= telemetry.watch_state(outcome.after.router_state)
        return {"router": scalars, "load": telemetry.load(statistics)}


MEASURES = (RouterMeasures(),)
"""Parts that every step has, after all others but those of its observer."""
