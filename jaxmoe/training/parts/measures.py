# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of every step that measure it: routers, and levels of a packed batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.data.batch import Batch
from jaxmoe.routing import telemetry
from jaxmoe.training.measures.levels import level_measures
from jaxmoe.training.parts.base import Outcome, StepPart

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import StepGradients
    from jaxmoe.training.state import TrainState
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LevelMeasures(StepPart):
    """Micro-batches and tokens by level, of batches packed by level."""

    name: ClassVar[str] = "level_measures"

    def update(
        self, step: Step, state: TrainState, batch: Batch, gradients: StepGradients
    ) -> StepGradients:
        """Return the gradients with `levels` among the measures."""
        del state
        levels = {}
        if batch.level is not None:
            levels = level_measures(batch, step.execution, step.accumulation)
        return gradients._replace(measures={**gradients.measures, "levels": levels})


MEASURES = (RouterMeasures(), LevelMeasures())
"""Parts that every step has, after all others but those of its observer."""
