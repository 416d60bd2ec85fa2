# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: gradients over micro-batches, clipping, update, guard.

    loss  = sum of weighted nll / sum of weights  +  the balancers' losses  +  the adapter's
    guard : loss, gradient norm and new state all finite, the norm not far above those of the steps
            before (`jaxmoe.training.guard`), or else nothing changes

The guard selects whole states with `where` and never multiplies by zero, so one NaN or an infinite
square cannot leak into parameters, moments, optimiser counters or router state: they stay bitwise
what they were. Only the counters move. A step without a signal (`Objective.has_signal`) is alike.

With accumulation the cross-entropy is exactly that of the whole batch; the balancers' losses have
two forms, `buffer` and the exact `two_pass` (`jaxmoe.training.balance`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim.steps import ProbingTransformation
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing import RouterStatistics, telemetry
from jaxmoe.routing.telemetry.detailed import mean_log_prob
from jaxmoe.scaling.initialize import lay_out, parameter_table
from jaxmoe.training import NextTokenConfig, ObjectiveConfig
from jaxmoe.training.accumulation import GradientSums
from jaxmoe.training.balance import AccumulatedBalance
from jaxmoe.training.estimators.backprop import BackpropConfig
from jaxmoe.training.estimators.base import Gradients
from jaxmoe.training.guard import (
    all_finite,
    check_ratio,
    norm_limit,
    remember,
    select,
)
from jaxmoe.training.host_arrays import global_norm, is_on_host
from jaxmoe.training.measures.indicators import watch_layers, watch_routers
from jaxmoe.training.measures.levels import level_measures
from jaxmoe.training.metrics import StepMetrics as StepMetrics
from jaxmoe.training.optimizer_files.part_files import PartFiles
from jaxmoe.training.optimizer_files.step import FilesStep
from jaxmoe.training.optimizer_parts import check_layerwise, modules_of, update_in_parts
from jaxmoe.training.parts.adapter_rule import model_parts
from jaxmoe.training.parts.base import StepPart, check_parts, run_after
from jaxmoe.training.pipeline.skipping import SkippingConfig
from jaxmoe.training.state import (
    GRADIENTS,
    Clipped,
    TrainState,
    UpdatedParams,
    WholeState,
    fetch,
    trained_part,
    update_routers,
)
from jaxmoe.training.state import CheckedStep as CheckedStep
from sharding.constrain import place_like


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
    objective: ObjectiveConfig = NextTokenConfig()
    """What is predicted from what."""
    max_norm_ratio: float | None = None
    """Largest gradient norm, in medians of the last accepted steps; a step above it is refused.
    None refuses only what is not finite."""
    workers: int = 1
    """Equal parts of the batch whose losses are reported apart; 1: none are."""
    table: ParameterTable | None = None
    """Groups of the parameters, from which the optimiser was built; those of the group `frozen` are
    not differentiated and stay bitwise. None trains all."""
    skipping: SkippingConfig | None = None
    """Layers that micro-batches leave out; None for none."""
    gradients: Gradients = BackpropConfig()
    """How the gradient is computed or estimated."""
    files: PartFiles | None = None
    """Files of the optimiser state, for `execution.optimizer_memory` files; see
    `jaxmoe.training.optimizer_files.step.open_files`."""
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
        check_layerwise(self.execution, self.optimizer)
        self.gradients.check_clip(self.clip)
        self.gradients.check(self)
        check_parts(self.chain, self)

    @property
    def chain(self) -> tuple[StepPart, ...]:
        """All parts in their order, those that the model brings first."""
        return (*model_parts(self.model), *self.parts)

    @property
    def has_probes(self) -> bool:
        """Whether the optimiser reads the gradients of probes; see `jaxmoe.layers.probes`."""
        return isinstance(self.optimizer, ProbingTransformation)

    def __call__(
        self, state: TrainState, batch: Batch, first_row: Any = 0
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the next state, metrics, and the routing statistics of the batch.

        Args:
            state: State before the step.
            batch: Rows.
            first_row: Number of the first row, where the batch is part of a larger one.
        """
        found = self.gradients.compute(self, state, batch, first_row)
        aside = {"own": found.state, "has_signal": self.objective.has_signal(batch)}
        state, metrics, statistics = self.finish(state, *found[:3], **aside)
        measures = level_measures(batch, self.execution, self.accumulation)
        return state, dataclasses.replace(metrics, levels=measures), statistics

    def jitted(self) -> CheckedStep:
        """Return the jitted (state, batch) -> (state, metrics); it donates its state."""
        if self.execution.optimizer_memory == "files":
            return CheckedStep(FilesStep(self), self.model.vocab_size)

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
            state, metrics, _ = self(state, batch)
            return state, metrics

        return CheckedStep(jax.jit(step, donate_argnums=0), self.model.vocab_size)

    def finish(
        self,
        state: TrainState,
        weight: Float[Array, ""],
        summed: GradientSums,
        worker_loss: Float[Array, " W"] | None,
        **aside: Any,
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the state after an update with the gradients, or after a refusal.

        Args:
            state: State before the step.
            weight: Sum of the loss weights.
            summed: Sums over the batch.
            worker_loss: Losses of the workers that are reported apart.
            **aside: Further arguments of `judged`.
        """
        clipped = self.clipped(summed.grads)
        update = update_params(
            self.model,
            self.optimizer,
            self.execution,
            clipped.grads,
            state,
            self.table,
            after=(summed.loss, clipped.norm),
            scale=clipped.scale,
            probes=summed.probes,
        )
        return self.judged(state, weight, summed, clipped, update, worker_loss, **aside)

    def clipped(self, grads: Any) -> Clipped:
        """Return gradients with a norm of at most `clip`; those in host memory stay as they are."""
        norm, scale = global_norm(grads), jnp.ones(())
        if self.clip is not None and self.gradients.clips == "norm":
            scale = jnp.minimum(1.0, self.clip / jnp.maximum(norm, 1e-12))
            grads = jax.tree.map(lambda g: g if is_on_host(g) else g * scale.astype(g.dtype), grads)
        return Clipped(grads, norm, scale)

    def may_update(
        self, state: TrainState, loss: Float[Array, ""], norm: Float[Array, ""]
    ) -> Bool[Array, ""]:
        """Return whether the guard accepts loss and gradient norm of a step.

        Args:
            state: State before the step.
            loss: Cross-entropy.
            norm: Norm of the gradients.
        """
        limit = norm_limit(state.recent_norms, self.max_norm_ratio)
        return jnp.isfinite(loss) & jnp.isfinite(norm) & (norm.astype(limit.dtype) <= limit)

    def judged(
        self,
        state: TrainState,
        weight: Float[Array, ""],
        summed: GradientSums,
        clipped: Clipped,
        update: UpdatedParams,
        worker_loss: Float[Array, " W"] | None,
        own: Any = None,
        has_signal: Bool[Array, ""] | None = None,
    ) -> tuple[TrainState, StepMetrics, RouterStatistics | None]:
        """Return the state after an update, or after a refusal by the guard.

        Args:
            state: State before the step.
            weight: Sum of the loss weights.
            summed: Sums over the batch; its gradients are not read.
            clipped: Clipped gradients; read for the norms of layers, if the state keeps them.
            update: Results of the optimiser.
            worker_loss: Losses of the workers that are reported apart.
            own: State of `gradients` after the step; None without.
            has_signal: See `Objective.has_signal`.
        """
        statistics, grad_norm, before = summed.statistics, clipped.norm, state
        new = (update.params, update_routers(self.model, state, statistics))
        old = (state.params, state.router_state)
        is_good = self.may_update(state, summed.loss, grad_norm)
        is_good &= all_finite(new[1]) & update.is_finite(self.optimizer)
        moves = is_good if has_signal is None else is_good & has_signal
        kept = select(moves, new, old)
        in_a_row = jnp.where(is_good, 0, state.skipped_in_a_row + 1)
        parts = state.parts
        if own is not None:
            parts = {**parts, GRADIENTS: select(moves, own, parts[GRADIENTS])}
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=kept[0],
            opt_state=update.opt_state.kept(moves),
            router_state=kept[1],
            skipped=state.skipped + (~is_good).astype(jnp.int32),
            skipped_in_a_row=in_a_row,
            recent_norms=remember(state.recent_norms, grad_norm, moves),
            parts=parts,
        )
        state = run_after(self.chain, self, before, state, clipped.grads, moves)
        metrics = StepMetrics(
            loss=summed.loss,
            losses=summed.losses,
            grad_norm=grad_norm,
            num_tokens=weight,
            is_skipped=~is_good,
            skipped_in_a_row=in_a_row,
            router=watch_routers(state, statistics, self.execution),
            load=None if statistics is None else telemetry.load(statistics),
            indicators=watch_layers(
                self.model,
                summed.indicators,
                update.updates,
                old[0],
                moves,
                self.execution.placement,
                step=state.step - 1,
            ),
            quality=mean_log_prob(statistics),
            norm_limit=norm_limit(before.recent_norms, self.max_norm_ratio),
            worker_loss=worker_loss,
        )
        return state, metrics, statistics


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
    return step.jitted()


def update_params(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    execution: ExecutionConfig,
    grads: Any,
    state: TrainState,
    table: ParameterTable | None = None,
    *,
    after: tuple[Array, Array],
    scale: Array | float = 1.0,
    probes: Any = None,
) -> UpdatedParams:
    """Apply the optimiser to gradients and parameters sharded like its state.

    Args:
        model: of the parameters.
        optimizer: an optax transformation.
        execution: whose layout says how they are cut.
        grads: laid out as the parameters.
        state: before the step.
        table: Groups of the parameters; None trains all.
        after: Scalars before which state in host memory is not fetched; see `update_in_parts`.
        scale: Factor of the gradients that lie in host memory.
        probes: Gradients of probes, for an optimiser that reads them; None for others.
    """
    old = state.params if table is None else table.trained(state.params)
    is_away = execution.parameter_memory == "host"
    if is_away:  # the layouts of parameters and state are one
        held = old
    else:
        cut = partial(lay_out, model, rules=execution.state_layout.optimizer)
        held, grads = cut(old), cut(grads)
    if execution.updates_in_parts:
        modules = modules_of(model, held, execution.optimizer_parts)
        updates, params, new = update_in_parts(
            optimizer.update, modules, grads, state.opt_state, held, after=after, scale=scale
        )
    else:
        fetched = fetch(state.opt_state, execution)
        update: Any = optimizer.update
        given = {} if probes is None else {"stats": probes}
        updates, opt_state = update(grads, fetched, held, **given)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), held, updates)
        new = WholeState(new=opt_state, old=fetched, execution=execution)
    if is_away:
        updates = None
    else:
        params = jax.tree.map(place_like, params, old)
    if table is not None and table.has_frozen:
        params = table.merged(params, state.params)
        if updates is not None:
            updates = table.merged(updates, jax.tree.map(jnp.zeros_like, state.params))
    return UpdatedParams(updates, params, new)
