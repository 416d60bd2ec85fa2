# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: gradients, parts before the update, update, parts after, guard.

    gradients   `Gradients.compute`: the loss of the micro-batches, differentiated or estimated
    parts       `StepPart.update`, `after`, `settle`, `measure` (`jaxmoe/training/parts/base.py`)
    update      clipping, and the optimiser on gradients and parameters laid out as its state
    guard       loss, gradient norm and new state all finite, the norm not far above those of the
                steps before (`jaxmoe/training/guard.py`), or else nothing changes

The guard selects whole states with `where` and never multiplies by zero, so one NaN or an infinite
square cannot leak into parameters, moments, optimiser counters, router state or the states of
parts: they stay bitwise what they were. Only the counters move. A step without a signal
(`Objective.has_signal`) is alike.

With accumulation the cross-entropy is exactly that of the whole batch; the balancers' losses have
two forms, `buffer` and the exact `two_pass` (`jaxmoe/training/balance.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxmoe import combinations
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.observer import observer_of
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import NextTokenConfig, Objective
from jaxmoe.training.balance import AccumulatedBalance, update_routers
from jaxmoe.training.estimators.backprop import BackpropConfig
from jaxmoe.training.estimators.base import Gradients, StepGradients
from jaxmoe.training.guard import (
    all_finite,
    check_ratio,
    norm_limit,
    norm_of_judged,
    remember,
    select,
)
from jaxmoe.training.host_arrays import global_norm, is_on_host
from jaxmoe.training.metrics import StepMetrics as StepMetrics
from jaxmoe.training.parts.base import (
    Outcome,
    StepPart,
    check_parts,
    run_after,
    run_measure,
    run_update,
)
from jaxmoe.training.parts.measures import MEASURES
from jaxmoe.training.parts.update import CheckedStep as CheckedStep
from jaxmoe.training.parts.update import Clipped, Update, UpdatedParams, update_of, update_params
from jaxmoe.training.state import GRADIENTS, TrainState, model_parts, trained_part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step: all that decides it, as a function to be jitted.

    It is the only record of a step: `make_train_step` makes one, planning traces one, and
    members of `Gradients` read it.
    """

    model: ModelConfig
    """What is trained."""
    optimizer: optax.GradientTransformation
    execution: ExecutionConfig = ExecutionConfig()
    """Where and how it is computed."""
    accumulation: int = 1
    """Micro-batches per step; must divide the batch."""
    clip: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    accumulated_balance: AccumulatedBalance = "buffer"
    """Form of a balance loss of the global batch over micro-batches."""
    objective: Objective = NextTokenConfig()
    """What is predicted from what."""
    max_norm_ratio: float | None = None
    """Largest gradient norm without embeddings, in medians of the last accepted steps; a step above
    it is refused. None refuses only what is not finite."""
    table: ParameterTable | None = None
    """Groups of the parameters, from which the optimiser was built; those of the group `frozen` are
    not differentiated and stay bitwise. None trains all."""
    gradients: Gradients = BackpropConfig()
    """How the gradient is computed or estimated."""
    update: Update | None = None
    """How parameters and optimiser state are updated; what the execution asks for when None."""
    parts: tuple[StepPart, ...] = ()
    """What the step does beside gradients, update and guard; the state is made with the same."""

    def __post_init__(self):
        self.check()

    def check(self) -> None:
        """Refuse what cannot be trained, before anything is traced.

        Raises:
            ValueError: `accumulation` below 1, `clip` not above 0, `max_norm_ratio` not above 1, a
                precision for inference alone, a model that does not fit the objective, or a choice
                that the gradients or a part cannot be computed with.
        """
        if self.accumulation < 1:
            raise ValueError(f"accumulation={self.accumulation} must be at least 1")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0, or None not to clip")
        check_ratio(self.max_norm_ratio)
        self.execution.precision.check_trains(has_adapter=self.model.adapter is not None)
        self.objective.check(self.model)
        self.updater.check(self)
        combinations.check(model=self.model, execution=self.execution, training=self)
        self.gradients.check(self)
        check_parts(self.chain, self)

    @property
    def chain(self) -> tuple[StepPart, ...]:
        """All parts in their order: those that the model brings first, those that measure last."""
        observer = observer_of(self.execution)
        return (*model_parts(self.model), *self.parts, *MEASURES, *observer.parts)

    @property
    def updater(self) -> Update:
        """How parameters and optimiser state are updated."""
        return self.update or update_of(self.execution)

    @property
    def reads_row_losses(self) -> bool:
        """Whether a part reads the losses of single rows, `GradientSums.row_nll`."""
        return any(part.reads_row_losses for part in self.chain)

    def without(self, name: str) -> Step:
        """Return the step without one of its parts.

        Args:
            name: `StepPart.name`; a step without such a part stays as it is.
        """
        parts = tuple(part for part in self.parts if part.name != name)
        return dataclasses.replace(self, parts=parts)

    def __call__(
        self, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the next state, metrics, and the routing statistics of the batch.

        Args:
            state: State before the step.
            batch: Rows.
            first_row: Number of the first row, where the batch is part of a larger one.
        """
        gradients = self.begin(state, batch, first_row)
        return self.finish(state, gradients)

    def jit_step(self) -> CheckedStep:
        """Return the jitted (state, batch) -> (state, metrics); it donates its state."""
        return self.updater.jit_step(self)

    def begin(self, state: TrainState, batch: Batch, first_row: Any = 0) -> StepGradients:
        """Return the gradients of a step after its parts; arguments as of a call."""
        gradients = self.gradients.compute(self, state, batch, first_row)
        gradients = gradients._replace(has_signal=self.objective.has_signal(batch))
        return run_update(self.chain, self, state, batch, gradients)

    def finish(
        self, state: TrainState, gradients: StepGradients
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the state after an update with the gradients, or after a refusal.

        Args:
            state: State before the step.
            gradients: Sums over the batch.
        """
        clipped = self.clip_gradients(gradients.summed.grads)
        update = update_params(self, state, gradients.summed, clipped)
        return self.guard_update(state, gradients, clipped, update)

    def clip_gradients(self, grads: Any) -> Clipped:
        """Return gradients with a norm of at most `clip`; those in host memory stay as they are."""
        norm = global_norm(grads)
        clipped = grads
        scale = jnp.ones(())
        if self.clip is not None and self.gradients.clips == "norm":
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(norm, 1e-12))
            clipped = jax.tree.map(
                lambda g: g if is_on_host(g) else g * scale.astype(g.dtype), grads
            )
        return Clipped(clipped, norm, self._judged_norm(grads, norm), scale)

    def _judged_norm(self, grads: Any, norm: Float[Array, ""]) -> Float[Array, ""]:
        """Return the norm that the guard compares with those of earlier steps."""
        if self.max_norm_ratio is None:
            return norm
        rows = self.table or parameter_table(self.model)
        paths = {row.path for row in rows if row.declaration.role == "embedding"}
        return norm_of_judged(grads, norm, paths)

    def may_update(
        self, state: TrainState, loss: Float[Array, ""], norm: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Return whether the guard accepts loss and gradient norm of a step.

        Args:
            state: State before the step.
            loss: Cross-entropy.
            norm: Norm of the gradients that the guard reads.
        """
        limit = norm_limit(state.recent_norms, self.max_norm_ratio)
        return jnp.isfinite(loss) & jnp.isfinite(norm) & (norm.astype(limit.dtype) <= limit)

    def guard_update(
        self,
        state: TrainState,
        gradients: StepGradients,
        clipped: Clipped,
        update: UpdatedParams,
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the state after an update and the parts after it, or after a refusal.

        Args:
            state: State before the step.
            gradients: Sums over the batch; their gradients are not read.
            clipped: Clipped gradients.
            update: Results of the optimiser.
        """
        before = state
        summed = gradients.summed
        new = (update.params, update_routers(self.model, state, summed.statistics))
        is_good = self.may_update(state, summed.loss, clipped.judged_norm)
        is_good &= all_finite(new[1]) & update.is_finite(self.optimizer)
        moves = is_good if gradients.has_signal is None else is_good & gradients.has_signal
        params, router_state = select(moves, new, (state.params, state.router_state))
        parts = state.parts
        if gradients.state is not None:
            parts = {**parts, GRADIENTS: select(moves, gradients.state, parts[GRADIENTS])}
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=update.opt_state.kept(moves),
            router_state=router_state,
            skipped=state.skipped + (~is_good).astype(jnp.int32),
            skipped_in_a_row=jnp.where(is_good, 0, state.skipped_in_a_row + 1),
            recent_norms=remember(
                state.recent_norms, clipped.judged_norm, moves & (gradients.weight > 0.0)
            ),
            parts=parts,
        )
        state = run_after(self.chain, self, before, state, clipped.grads, moves)
        outcome = Outcome(before, state, gradients, update.updates, moves)
        metrics = StepMetrics(
            loss=summed.loss,
            losses=summed.losses,
            grad_norm=clipped.norm,
            num_tokens=gradients.weight,
            is_skipped=~is_good,
            skipped_in_a_row=state.skipped_in_a_row,
            norm_limit=norm_limit(before.recent_norms, self.max_norm_ratio),
            judged_norm=clipped.judged_norm,
            **run_measure(self.chain, self, outcome),
        )
        return state, metrics, summed.statistics


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    execution: ExecutionConfig | None = None,
    accumulation: int = 1,
    clip: float | None = 1.0,
    **options: Any,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the jitted training step; it donates its state.

    Args:
        model: What is trained.
        optimizer: Optax transformation.
        execution: Where and how it is computed; one device when None.
        accumulation: Micro-batches per step; must divide the batch.
        clip: Largest global gradient norm; None does not clip.
        **options: Further fields of `Step`; those that are None have their defaults. `table` is by
            default that of the model, if the model has an adapter.

    Raises:
        TypeError: `Step` has no such field.
        ValueError: See `Step.check`.
    """
    fields = {name: value for name, value in options.items() if value is not None}
    if model.adapter is not None:
        fields.setdefault("table", parameter_table(model))
    step = Step(
        model=model,
        optimizer=trained_part(model, optimizer),
        execution=execution or ExecutionConfig(),
        accumulation=accumulation,
        clip=clip,
        **fields,
    )
    return step.jit_step()
