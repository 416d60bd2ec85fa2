# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Socket `StepPart`: what a step does beside gradients, update and guard.

    check(step)                          refuses a step that the part cannot be in
    init(start)                          state before the first step, in `TrainState.parts[name]`
    update(step, state, batch, grads)    the gradients before they are clipped and applied
    after(step, before, after, grads)    the training state after an update that was accepted
    settle(step, before, after)          the training state after every step, refused ones included
    measure(step, outcome)               further fields of `StepMetrics`

The parts of a step are chained: each receives what the one before it returned. A part may change
any field of the state. What `after` returns is kept only if the guard accepted the step, and
otherwise every array is bitwise what it was; leaves that are returned as they came cost nothing.
`settle` is for what holds of every state, such as a copy of parameters.

All methods are traced inside the compiled step, on any mesh. Each is neutral by default.

To add a part: a frozen dataclass that extends `StepPart`, and a row of CASES or STATELESS in
`tests/jaxmoe/training/parts/test_contract.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from jaxtyping import Array, Bool, Key

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.training.guard import select_changed

if TYPE_CHECKING:
    from jaxmoe.training.estimators.base import StepGradients
    from jaxmoe.training.state import TrainState
    from jaxmoe.training.step import Step


class Start(NamedTuple):
    """What the state of a part begins with."""

    model: ModelConfig
    execution: ExecutionConfig
    params: Any
    """Parameters before the first step."""
    trained: Any
    """Those that are trained, in device memory."""
    key: Key[Array, ""]
    """Key of the initial values; fold a number or a name of one's own into it."""


class Outcome(NamedTuple):
    """What has happened in a step."""

    before: TrainState
    """State before the step."""
    after: TrainState
    """State after it."""
    gradients: StepGradients
    """Sums over the batch."""
    updates: Any
    """What the optimiser would add to the parameters; None where those of layers lie in host
    memory."""
    is_accepted: Bool[Array, ""]
    """Whether the step changed the state beside its counters."""


class StepPart:
    """Base of the members; see the contract at the beginning of the file."""

    __slots__ = ()

    name: ClassVar[str]
    """Key of the state in `TrainState.parts`."""
    reads_row_losses: ClassVar[bool] = False
    """Whether `update` reads the losses of single rows, which backpropagation then keeps."""

    def check(self, step: Step) -> None:
        """Refuse a step that the part cannot be in, before anything is traced.

        Args:
            step: Step with the part.

        Raises:
            ValueError: See the part.
        """
        del step

    def init(self, start: Start) -> Any:
        """Return the state before the first step; None for a part without one.

        Args:
            start: Model and parameters.
        """
        del start

    def update(
        self, step: Step, state: TrainState, batch: Batch, gradients: StepGradients
    ) -> StepGradients:
        """Return the gradients of a step before they are clipped and applied.

        Args:
            step: Step with the part.
            state: State before the step.
            batch: Rows of the step.
            gradients: Sums over the batch; `measures` are further fields of `StepMetrics`.
        """
        del step, state, batch
        return gradients

    def after(self, step: Step, before: TrainState, after: TrainState, grads: Any) -> TrainState:
        """Return the training state after an accepted update, and what the part does to it.

        Args:
            step: Step with the part.
            before: State before the step.
            after: State with the new parameters and moments. `step` counts this step; `rng` is the
                constant key of the run: fold `step` into it. `params` has all parameters;
                `opt_state` those trained.
            grads: Clipped gradients of the step at the parameters before it, a tree like the
                parameters with `optax.MaskedNode` for frozen ones.
        """
        del step, before, grads
        return after

    def settle(self, step: Step, before: TrainState, after: TrainState) -> TrainState:
        """Return the training state after every step, whether it was accepted or refused.

        Args:
            step: Step with the part.
            before: State before the step.
            after: State that the guard has chosen.
        """
        del step, before
        return after

    def measure(self, step: Step, outcome: Outcome) -> dict[str, Any]:
        """Return further fields of `StepMetrics` by name; entries of dicts are added to a field.

        Args:
            step: Step with the part.
            outcome: What has happened.
        """
        del step, outcome
        return {}

    def own_state(self, state: TrainState) -> Any:
        """Return the state of the part.

        Args:
            state: Training state.

        Raises:
            ValueError: The training state was made without the part.
        """
        if self.name not in state.parts:
            raise ValueError(
                f"state.parts has no {self.name}, which the step has a part for: make the state"
                " with init_state(..., parts=step.parts)"
            )
        return state.parts[self.name]

    def with_state(self, state: TrainState, part_state: Any) -> TrainState:
        """Return the training state with another state of the part.

        Args:
            state: Training state.
            part_state: State of the part.
        """
        return dataclasses.replace(state, parts={**state.parts, self.name: part_state})


def check_parts(parts: Sequence[StepPart], step: Step) -> None:
    """Refuse parts that a step cannot have.

    Args:
        parts: Parts of the step.
        step: Step with the parts.

    Raises:
        ValueError: Two parts have one name, or a part refuses the step.
    """
    names = [part.name for part in parts]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"parts={names}: two parts of a step have the name {double[0]}, under which"
            " TrainState.parts keeps the state of one: leave one out"
        )
    for part in parts:
        part.check(step)


def init_parts(parts: Sequence[StepPart], start: Start) -> dict[str, Any]:
    """Return `TrainState.parts` before the first step.

    Args:
        parts: Parts of the step.
        start: Model and parameters.
    """
    states = {part.name: part.init(start) for part in parts}
    return {name: state for name, state in states.items() if state is not None}


def run_update(
    parts: Sequence[StepPart],
    step: Step,
    state: TrainState,
    batch: Batch,
    gradients: StepGradients,
) -> StepGradients:
    """Return the gradients after what all parts do before the update.

    Args:
        parts: Parts of the step, in their order.
        step: Step with the parts.
        state: State before the step.
        batch: Rows of the step.
        gradients: Sums over the batch.
    """
    for part in parts:
        gradients = part.update(step, state, batch, gradients)
    return gradients


def run_measure(parts: Sequence[StepPart], step: Step, outcome: Outcome) -> dict[str, Any]:
    """Return the fields of `StepMetrics` that all parts measure, by name.

    Args:
        parts: Parts of the step, in their order.
        step: Step with the parts.
        outcome: What has happened.
    """
    fields = dict(outcome.gradients.measures)
    for part in parts:
        for name, value in part.measure(step, outcome).items():
            fields[name] = {**fields.get(name, {}), **value} if isinstance(value, dict) else value
    return fields


def run_after(
    parts: Sequence[StepPart],
    step: Step,
    before: TrainState,
    after: TrainState,
    grads: Any,
    is_accepted: Bool[Array, ""],
) -> TrainState:
    """Return the state after what all parts do after an update, and after each step.

    Args:
        parts: Parts of the step, in their order.
        step: Step with the parts.
        before: State before the step.
        after: State that the guard has chosen.
        grads: Clipped gradients.
        is_accepted: Whether the guard accepted the step.
    """
    for part in parts:
        changed = part.after(step, before, after, grads)
        if changed is not after:
            after = select_changed(is_accepted, changed, after)
    for part in parts:
        after = part.settle(step, before, after)
    return after
