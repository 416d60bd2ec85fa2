# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`DetailedObserver`: indicators of instability, detailed routing statistics, experts twice."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Bool, Float

from jaxmoe.contrib.telemetry.experts import observe_activations, observe_experts, observed_axes
from jaxmoe.contrib.telemetry.indicators import (
    observe_attention,
    observe_branch,
    observe_routing,
)
from jaxmoe.contrib.telemetry.routing import observe
from jaxmoe.contrib.telemetry.step import DetailedMeasures, observe_head
from jaxmoe.data.batch import Batch
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.observer import ExpertCall, LogicalAxes, Observations, Observer, RoutedCall
from jaxmoe.routing import RouterInputs, RouterOutput
from jaxmoe.routing.base import Arrays
from jaxmoe.training.parts.base import StepPart
from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DetailedObserver(Observer):
    """Observes sizes and outliers of branches, logits, correlations of experts and updates."""

    name: ClassVar[str] = "detailed"
    reads_attention: ClassVar[bool] = True
    reads_weights: ClassVar[bool] = True
    parts: ClassVar[tuple[StepPart, ...]] = (DetailedMeasures(),)

    def branch(
        self, name: str, output: Float[Array, "B S D"], token_mask: Bool[Array, "B S"]
    ) -> Observations:
        """Return size and outliers of the output."""
        return observe_branch(name, output, token_mask)

    def attention(
        self, logits: dict[str, Array], token_mask: Bool[Array, "B S"]
    ) -> Observations | None:
        """Return the size of the logits; None where no mixer has computed any."""
        return observe_attention(logits, token_mask) if logits else None

    def router(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return the statistics of `routing.py`."""
        return observe(output, inputs)

    def expert_axes(self, moe: MoEConfig, axes: LogicalAxes) -> dict[str, LogicalAxes]:
        """Return the names of the logits and correlations of `experts.py`."""
        return observed_axes(moe, axes)

    def experts(self, moe: MoEConfig, call: ExpertCall) -> dict[str, Float[Array, "T ..."]]:
        """Return logits and the mean cosine of the outputs, which are computed once more."""
        return observe_experts(observed_axes(moe, (None, None)), call, moe.num_experts)

    def routing(self, call: RoutedCall) -> Observations:
        """Return the size of the router logits and the correlations of the experts."""
        values = call.values
        routing = call.routing
        observations = observe_routing(call.statistics, values, routing.token_mask)
        gate_up = call.weights["gate_up"]
        if "logits" in values and isinstance(gate_up, jax.Array):  # not rounded to few bits
            logits = values["logits"]
            observations |= observe_activations(call.x, logits, gate_up, routing, call.placement)
        return observations

    def head(
        self, params: Any, hidden: Float[Array, "B S D"], batch: Batch, step: Step
    ) -> Observations:
        """Return the size of the output logits."""
        return observe_head(params, hidden, batch, step.model, step.execution)
