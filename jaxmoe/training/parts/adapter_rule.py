# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The part of a step that a model with an adapter brings: `Adapter.after_step` and its state."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax

from jaxmoe.adapters.base import STATE, Adapter, StepGiven
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.parts.base import Start, StepPart

if TYPE_CHECKING:
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRule(StepPart):
    """What an adapter does after each accepted update, if anything."""

    name: ClassVar[str] = STATE

    adapter: Adapter

    def init(self, start: Start) -> Any:
        """Return what the adapter carries from step to step."""
        key = jax.random.fold_in(start.key, 2)
        return self.adapter.first_state(start.params, parameter_table(start.model), key)

    def after(self, step: Step, before: TrainState, after: TrainState, grads: Any) -> TrainState:
        """Return the training state after the rule of the adapter."""
        if not self.adapter.has_after_step:
            return after
        table = step.table or parameter_table(step.model)
        step_inputs = StepGiven(before, table, step.execution.placement)
        return self.adapter.after_step(after, grads, step_inputs)
