# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of workers that exchange gradients.

Each worker computes the gradients of its rows, the exchange makes one gradient of them, and clip,
update and guard are those of an ordinary step. A step that the guard refuses leaves the state of
the exchanges as it was.

The losses are means over the tokens, and the statistics of routers sums, of the workers that are
not left out (`gradient_method.py`). Balance losses are those of the rows of one
worker.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.contrib.slow_links.fragments import flat, nest
from jaxmoe.contrib.slow_links.gradient_method import Contribution, exchange_gradients
from jaxmoe.contrib.slow_links.workers.gradient_state import GradientTraining
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.places import alone
from jaxmoe.data.batch import Batch
from jaxmoe.training.accumulation import GradientSums
from jaxmoe.training.estimators.base import StepGradients
from jaxmoe.training.guard import all_finite, select
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import TrainState, fetch
from jaxmoe.training.step import CheckedStep, Step, StepMetrics


def make_gradient_step(training: GradientTraining) -> CheckedStep:
    """Return the jitted step of all workers; it donates its state.

    Args:
        training: Method and the step of the whole batch.

    Returns:
        (state, batch) -> (state, metrics).
    """

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        return gradient_step(training, state, batch)

    return CheckedStep(jax.jit(run, donate_argnums=0), training.step.model.vocab_size)


def gradient_step(
    training: GradientTraining,
    state: TrainState,
    batch: Batch,
    alive: Bool[Array, " R"] | None = None,
) -> tuple[TrainState, StepMetrics]:
    """Return the state after a step, and its metrics.

    Args:
        training: Method and the step of the whole batch.
        state: State before the step.
        batch: Rows of all workers.
        alive: Workers that answer; None for all, as in every run.
    """
    step = training.step
    inner = alone(step).without(WorkerLosses.name)
    contributions, sums = worker_gradients(inner, training, state, batch)
    method = training.method
    agreed = None
    if method.agreed is not None:
        agreed = method.agreed(fetch(state.opt_state, step.execution))
    grads, talk, counted = exchange_gradients(
        method,
        training.leaves,
        local_of(state),
        contributions,
        training.trained_by_path(state.params),
        training.workers,
        number=state.step,
        key=jax.random.fold_in(state.rng, state.step),
        agreed=agreed,
        alive=alive,
    )
    weight, summed = _combine(sums, contributions.tokens, counted)
    trained = state.params if step.table is None else step.table.select_trained(state.params)
    summed = replace(summed, grads=nest(flat(trained) | grads))
    measures = {}
    if step.reads_row_losses:
        measures = {"worker_loss": jnp.where(counted[:, 0], sums.loss[:, 0], jnp.nan)}
    after, metrics, _ = step.finish(state, StepGradients(weight, summed, measures=measures))
    return with_local(after, select(~metrics.is_skipped, talk, local_of(state))), metrics


def worker_gradients(
    step: Step, training: GradientTraining, state: TrainState, batch: Batch
) -> tuple[Contribution, GradientSums]:
    """Return what the workers bring to the exchange, and their losses and statistics, [R P ...].

    Args:
        step: Step of one worker.
        training: Method.
        state: State before the step.
        batch: Rows of all workers.
    """
    workers = training.workers
    code = training.method.code
    parts = 1 if code is None else code.parts
    factors = jnp.asarray([(1.0,)] * workers.number if code is None else code.factors)
    params = training.trained_by_path(state.params)
    shared = {
        "params": state.params,
        "router_state": state.router_state,
        "step": state.step,
        "key": jax.random.key_data(state.rng),
        "factors": factors,
    }

    def of_worker(
        number: Int[Array, ""], worker_state: Any, rows: Batch, shared: Any
    ) -> tuple[Any, Any]:
        before = _state(shared)
        factors = shared["factors"][number]

        def part(total: Any, worker_part: Any) -> tuple[Any, Any]:
            place, rows, factor = worker_part
            first = (number + place) % workers.number * rows.tokens.shape[0]
            tokens, stacked, *_ = step.gradients.compute(step, before, rows, first)
            grads = training.trained_by_path(stacked.grads)
            is_finite = jnp.isfinite(stacked.loss) & all_finite(grads)
            weight = factor * tokens
            total = {path: x + grads[path] * weight.astype(x.dtype) for path, x in total.items()}
            return total, (tokens, is_finite, replace(stacked, grads=None, row_nll=None))

        if parts == 1:
            first = jax.tree.map(lambda x: x[0], (rows, factors))
            grads, stacked = part(worker_state, (jnp.int32(0), *first))
            stacked = jax.tree.map(lambda x: x[None], stacked)
        else:
            grads, stacked = jax.lax.scan(part, worker_state, (jnp.arange(parts), rows, factors))
        tokens, is_finite, stacked = stacked
        return grads, (tokens, jnp.all(is_finite), stacked)

    rows = workers.rows_around(jax.tree.map(jnp.asarray, batch), parts)
    # Zeros in the layout of the parameters, which the sums of the gradients keep.
    zeros = workers.stack(jax.tree.map(jnp.zeros_like, params))
    grads, (tokens, is_finite, stacked) = workers.each(of_worker)(zeros, rows, shared)
    return Contribution(grads=grads, tokens=tokens, is_finite=is_finite), stacked


def _state(shared: Any) -> TrainState:
    """Return the state that gradients are taken of."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(
        step=shared["step"],
        params=shared["params"],
        opt_state=(),
        router_state=shared["router_state"],
        rng=jax.random.wrap_key_data(shared["key"]),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def _combine(
    sums: GradientSums, tokens: Float[Array, "R P"], counted: Bool[Array, "R P"]
) -> tuple[Float[Array, ""], GradientSums]:
    """Return the tokens of the parts that count, and the losses and statistics of these parts."""

    def chosen(x: Array, otherwise: float = 0.0) -> Array:
        wide = counted[(...,) + (None,) * (x.ndim - 2)]
        return jnp.where(wide, x, jnp.full((), otherwise, x.dtype))

    def add(x: Array) -> Array:
        return jnp.sum(chosen(x), axis=(0, 1))

    total = jnp.sum(jnp.where(counted, tokens, 0.0))
    share = tokens / jnp.where(total > 0.0, total, 1.0)
    observations = sums.observations
    if observations is not None:
        observations = replace(
            observations,
            sums=jax.tree.map(add, observations.sums),
            counts=jax.tree.map(add, observations.counts),
            peaks=jax.tree.map(
                lambda x: jnp.max(chosen(x, -jnp.inf), axis=(0, 1)), observations.peaks
            ),
        )
    return total, GradientSums(
        grads=None,
        loss=add(sums.loss * share),
        losses={name: add(loss * share) for name, loss in sums.losses.items()},
        statistics=jax.tree.map(add, sums.statistics),
        observations=observations,
    )
