# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: gradients over micro-batches, clipping, update, guard.

    loss  = sum of weighted nll / sum of weights  +  the balancers' losses
    guard : loss, gradient norm and new state all finite, the norm not far above those of the steps
            before (`jaxmoe.training.guard`), or else nothing changes

The guard selects whole states with `where` and never multiplies by zero, so one NaN or an infinite
square cannot leak into parameters, moments, optimiser counters or router state: they stay bitwise
what they were. Only the counters move.

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
from jaxtyping import Array, Float

from jaxmoe.data.batch import Batch, check_batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.gather import gather_once, use_outside_layers
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import Output
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing import RouterStatistics, telemetry
from jaxmoe.routing.telemetry.detailed import mean_log_prob
from jaxmoe.scaling.initialize import lay_out, parameter_table
from jaxmoe.training import NextTokenConfig, ObjectiveConfig
from jaxmoe.training.accumulation import Gradients, MicroBatch, accumulate
from jaxmoe.training.balance import (
    AccumulatedBalance,
    buffered_losses,
    has_wide_balance,
    linearized_losses,
)
from jaxmoe.training.dispersion import worker_losses
from jaxmoe.training.guard import all_finite, check_ratio, norm_limit, remember, select
from jaxmoe.training.indicators import observe_head, watch_layers, watch_routers
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.metrics import StepMetrics as StepMetrics
from jaxmoe.training.pipeline import pipeline_gradients, remember_layers
from jaxmoe.training.pipeline.skipping import SkippingConfig, kept_groups
from jaxmoe.training.state import TrainState, fetch, put_away, update_routers
from sharding.constrain import place_like


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    execution: ExecutionConfig | None = None,
    accumulation: int = 1,
    clip: float | None = 1.0,
    accumulated_balance: AccumulatedBalance = "buffer",
    objective: ObjectiveConfig | None = None,
    max_norm_ratio: float | None = None,
    workers: int = 1,
    table: ParameterTable | None = None,
    skipping: SkippingConfig | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Return the jitted training step; it donates its state.

    Args:
        model: what is trained.
        optimizer: an optax transformation.
        execution: how it is computed; defaults when None.
        accumulation: micro-batches per step; must divide the batch.
        clip: largest global gradient norm; None does not clip.
        accumulated_balance: how a balance loss of the global batch is taken over micro-batches.
        objective: what is predicted from what; the next token when None.
        max_norm_ratio: largest gradient norm, in medians of the last accepted steps; a step above
            it is refused. None refuses only what is not finite.
        workers: equal parts of the batch whose losses are reported apart; 1: none are.
        table: Groups of the parameters, from which the optimiser was built; those of the group
            `frozen` are not differentiated and stay bitwise. None trains all.
        skipping: Layers that micro-batches leave out; None for none.

    Raises:
        ValueError: `accumulation` below 1, `clip` not above 0, `max_norm_ratio` not above 1, a
            precision for inference alone, or a model that does not fit the objective.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation} must be at least 1")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be above 0, or None not to clip")
    check_ratio(max_norm_ratio)
    execution = execution or ExecutionConfig()
    execution.precision.check_trains()
    objective = objective or NextTokenConfig()
    objective.check(model)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        state = dataclasses.replace(state, opt_state=fetch(state.opt_state, execution))
        weight, summed, worker_loss = batch_gradients(
            state,
            batch,
            model=model,
            execution=execution,
            objective=objective,
            accumulation=accumulation,
            accumulated_balance=accumulated_balance,
            workers=workers,
            table=table,
            skipping=skipping,
        )
        grads, statistics = summed.grads, summed.statistics
        grad_norm = optax.tree.norm(grads)
        if clip is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, params, opt_state = update_params(model, optimizer, execution, grads, state, table)
        new = (params, opt_state, update_routers(model, state, statistics))
        old = (state.params, state.opt_state, state.router_state)
        limit = norm_limit(state.recent_norms, max_norm_ratio)
        is_good = jnp.isfinite(summed.loss) & jnp.isfinite(grad_norm) & all_finite(new)
        is_good &= grad_norm.astype(limit.dtype) <= limit
        kept = select(is_good, new, old)
        in_a_row = jnp.where(is_good, 0, state.skipped_in_a_row + 1)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=kept[0],
            opt_state=put_away(kept[1], execution),
            router_state=kept[2],
            skipped=state.skipped + (~is_good).astype(jnp.int32),
            skipped_in_a_row=in_a_row,
            recent_norms=remember(state.recent_norms, grad_norm, is_good),
        )
        state = remember_layers(model, state, grads, is_good)
        metrics = StepMetrics(
            loss=summed.loss,
            losses=summed.losses,
            grad_norm=grad_norm,
            num_tokens=weight,
            is_skipped=~is_good,
            skipped_in_a_row=in_a_row,
            router=watch_routers(state, statistics, execution),
            load=None if statistics is None else telemetry.load(statistics),
            indicators=watch_layers(
                model,
                summed.indicators,
                updates,
                old[0],
                is_good,
                execution.placement,
                step=state.step - 1,
            ),
            quality=mean_log_prob(statistics),
            norm_limit=limit,
            worker_loss=worker_loss,
        )
        return state, metrics

    return _CheckedStep(jax.jit(step, donate_argnums=0), model.vocab_size)


class _CheckedStep:
    """Jitted step that checks its arguments, and the ids of the first batch and of numpy arrays."""

    def __init__(self, jitted: Any, vocab_size: int):
        self._jitted, self._vocab_size, self._has_run = jitted, vocab_size, False
        self.lower, self.trace = jitted.lower, jitted.trace

    def __call__(self, state: Any, batch: Any) -> Any:
        if not isinstance(state, TrainState):
            raise ValueError(f"state has type {type(state).__name__}: give that of init_state")
        check_batch(batch, self._vocab_size, has_ids=not self._has_run)
        self._has_run = True
        return self._jitted(state, batch)


def batch_gradients(
    state: TrainState,
    batch: Batch,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig,
    accumulation: int = 1,
    accumulated_balance: AccumulatedBalance = "buffer",
    workers: int = 1,
    table: ParameterTable | None = None,
    skipping: SkippingConfig | None = None,
) -> tuple[Float[Array, ""], Gradients, Float[Array, " W"] | None]:
    """Return the gradients of the loss of one step, over its micro-batches.

    Args:
        state: parameters, router state, randomness.
        batch: of the step.
        model: what is trained.
        execution: how.
        objective: what is predicted from what.
        accumulation: micro-batches.
        accumulated_balance: how a balance loss is taken over them.
        workers: equal parts of the batch whose losses are reported apart; 1: none are.
        table: Groups of the parameters; None trains all.
        skipping: Layers that micro-batches leave out; None for none.

    Returns:
        The sum of the loss weights, the sums over the micro-batches, and the workers' losses.
    """
    if skipping is not None:
        skipping.check(model, execution, accumulation, accumulated_balance)
    weight = objective.num_tokens(batch)
    key = jax.random.fold_in(state.rng, state.step)
    row_tokens = objective.row_tokens(batch) if workers > 1 else None
    batch = objective.prepare(model, batch, key, execution.placement)
    total_weight = jnp.where(weight > 0.0, weight, 1.0)
    given = {"model": model, "execution": execution, "objective": objective}
    given["whole"] = _gather_whole(model, state.params, execution)
    has_two_passes = accumulated_balance == "two_pass" and has_wide_balance(model)
    if execution.mesh.stage > 1:
        summed = pipeline_gradients(
            state,
            batch,
            total_weight,
            accumulation=accumulation,
            has_two_passes=has_two_passes,
            has_rows=workers > 1,
            table=table,
            paths=None if skipping is None else skipping.paths(accumulation),
            **given,
        )
    else:
        summed = accumulate(
            partial(
                compute_gradients,
                state,
                total_weight,
                is_whole=has_two_passes,
                has_rows=workers > 1,
                table=table,
                **given,
            ),
            batch,
            accumulation,
            execution.placement,
            statistics_of=partial(batch_statistics, state, **given) if has_two_passes else None,
            kept=kept_groups(skipping, accumulation),
        )
    found = worker_losses(summed.row_nll, row_tokens, workers, execution.placement)
    return weight, summed, found


def compute_gradients(
    state: TrainState,
    total_weight: Float[Array, ""],
    micro: MicroBatch,
    share: float,
    others: RouterStatistics | None,
    *,
    is_whole: bool,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig,
    whole: Any = None,
    has_rows: bool = False,
    table: ParameterTable | None = None,
) -> Gradients:
    """Return the gradients of one micro-batch's part of the loss.

    Args:
        state: parameters, router state, randomness.
        total_weight: sum of the loss weights of the whole batch.
        micro: the rows.
        share: of this micro-batch in the step.
        others: statistics of the micro-batches before this one, or of the whole batch; or None.
        is_whole: which of the two they are.
        model: what is trained.
        execution: how.
        objective: that prepared the batch.
        whole: gathered parameters, with a layout that gathers them once a step.
        has_rows: whether the cross-entropy of single rows is kept.
        table: Groups of the parameters; None trains all.
    """

    def loss_of(trained: Any) -> tuple[Array, tuple[Array, dict[str, Array], Any, Any, Any]]:
        params = trained if table is None else table.merged(trained, state.params)
        nll, rows, output = _forward(
            params, state, micro, model, execution, objective, whole, has_rows=has_rows
        )
        loss, losses = nll / total_weight, output.losses
        if output.statistics is not None and others is not None and is_whole:
            wide = linearized_losses(model, output.statistics, others, share)
            losses = {name: share * value for name, value in losses.items()} | wide
        elif output.statistics is not None:
            losses = losses | buffered_losses(model, output.statistics, others)
            losses = {name: share * value for name, value in losses.items()}
        indicators = output.indicators
        if indicators is not None:
            indicators |= observe_head(params, output.hidden, micro.batch, model, execution)
        return loss + sum(losses.values()), (loss, losses, output.statistics, indicators, rows)

    trained = state.params if table is None else table.trained(state.params)
    grads, (loss, losses, *aside) = jax.grad(loss_of, has_aux=True)(trained)
    statistics, indicators, rows = jax.lax.stop_gradient(aside)
    return Gradients(
        grads=grads,
        loss=loss,
        losses=losses,
        statistics=statistics,
        indicators=indicators,
        row_nll=rows,
    )


def batch_statistics(
    state: TrainState,
    micro: MicroBatch,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig,
    whole: Any = None,
) -> RouterStatistics:
    """Return the statistics of some rows as training sees them, without a gradient."""
    _, _, output = _forward(state.params, state, micro, model, execution, objective, whole)
    assert output.statistics is not None  # only models with balancers take two passes
    return jax.lax.stop_gradient(output.statistics)


def _forward(
    params: Any,
    state: TrainState,
    micro: MicroBatch,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig,
    whole: Any,
    *,
    has_rows: bool = False,
) -> tuple[Array, Array | None, Output]:
    if whole is not None:
        params, whole = use_outside_layers(params, whole, [scan.name for scan in model.scans])
    return forward_and_row_nll(
        model,
        execution,
        params,
        micro.batch,
        has_rows=has_rows,
        objective=objective,
        router_state=state.router_state,
        row_ids=micro.row_ids,
        kept=micro.kept,
        train=True,
        key=jax.random.fold_in(state.rng, state.step),
        whole=whole,
    )


def _gather_whole(model: ModelConfig, params: Any, execution: ExecutionConfig) -> Any:
    """Return all parameters gathered, if the layout gathers once a step; None otherwise."""
    if execution.state_layout.gathered != "step":
        return None
    declarations = parameter_table(model).tree(lambda row: row.declaration)
    return gather_once(params, declarations, execution)


def update_params(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    execution: ExecutionConfig,
    grads: Any,
    state: TrainState,
    table: ParameterTable | None = None,
) -> tuple[Any, Any, Any]:
    """Apply the optimiser to gradients and parameters sharded like its state.

    Args:
        model: of the parameters.
        optimizer: an optax transformation.
        execution: whose layout says how they are cut.
        grads: laid out as the parameters.
        state: before the step.
        table: Groups of the parameters; None trains all.

    Returns:
        What is added to the parameters; the sums, laid out as before; the optimiser's new state.
    """
    cut = partial(lay_out, model, rules=execution.state_layout.optimizer)
    old = state.params if table is None else table.trained(state.params)
    held = cut(old)
    updates, opt_state = optimizer.update(cut(grads), state.opt_state, held)
    params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), held, updates)
    params = jax.tree.map(place_like, params, old)
    if table is not None and table.has_frozen:
        params = table.merged(params, state.params)
        updates = table.merged(updates, jax.tree.map(jnp.zeros_like, state.params))
    return updates, params, opt_state
