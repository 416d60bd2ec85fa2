# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of every step that measure it: routers, layers, and levels of a packed batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from jaxmoe.data.batch import Batch
from jaxmoe.routing import telemetry
from jaxmoe.routing.telemetry.detailed import mean_log_prob
from jaxmoe.training.measures.indicators import watch_layers
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
        """Return `router`, `load` and `quality`."""
        statistics = outcome.gradients.summed.statistics
        if statistics is None:
            return {"router": {}, "load": None, "quality": None}
        state = outcome.after
        scalars = telemetry.summarise(statistics) | telemetry.watch_state(state.router_state)
        is_detailed = step.execution.telemetry == "detailed"
        if is_detailed:
            scalars |= telemetry.watch_params(state.params)
        return {
            "router": scalars,
            "load": telemetry.load(statistics),
            "quality": mean_log_prob(statistics) if is_detailed else None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerIndicators(StepPart):
    """Indicators of the layers, with detailed telemetry."""

    name: ClassVar[str] = "layer_indicators"

    def measure(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        """Return `indicators`."""
        if outcome.gradients.summed.indicators is None:
            return {"indicators": {}}
        indicators = watch_layers(
            step.model,
            outcome.gradients.summed.indicators,
            outcome.updates,
            outcome.before.params,
            outcome.is_accepted,
            step.execution.placement,
            step=outcome.after.step - 1,
        )
        return {"indicators": indicators}


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


MEASURES = (RouterMeasures(), LayerIndicators(), LevelMeasures())
"""Parts that every step has, after all others."""
