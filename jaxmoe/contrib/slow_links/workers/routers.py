# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Brings the state of routers, such as expert biases, together at an exchange.

A router's state follows from the routing statistics of the steps. Biases of workers that have
drifted apart are not averaged: the statistics of each step since the last exchange are added up
over the workers, and the updates of these steps are done once more, from the state of the last
exchange. The result is that of one large batch with the same statistics.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RouterStatistics
from jaxmoe.training.accumulation import MicroBatch
from jaxmoe.training.balance import update_routers
from jaxmoe.training.gradients import batch_statistics
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.constrain import without_mesh

Past = RouterStatistics
"""Statistics of each worker in the last H steps, [R H L ...]; step t is at t mod H."""
Total = RouterStatistics
"""Statistics of the last H steps, [H L ...], the oldest first; zeros before the last exchange."""


def begin_past(step: Step, state: TrainState, every: int, workers: Workers) -> Past | None:
    """Return statistics of no step; None for routers without state.

    Args:
        step: Step of one worker; of its execution precision and telemetry matter.
        state: State of one worker.
        every: Steps between exchanges (H).
        workers: Workers.
    """
    if not jax.tree.leaves(state.router_state):
        return None
    precision = step.execution.precision
    telemetry = step.execution.telemetry
    execution = ExecutionConfig(mesh=MeshConfig(), precision=precision, telemetry=telemetry)
    step = dataclasses.replace(step, execution=execution)
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, 4), jnp.float32)
    rows = Batch(tokens=ids, targets=ids, loss_weights=weights)  # pyright: ignore[reportArgumentType]

    def of_rows(state: TrainState, rows: Batch) -> RouterStatistics:
        batch = step.objective.prepare(step.model, rows, state.rng, execution.placement)
        micro = MicroBatch(batch=batch, row_ids=jnp.zeros((1,), jnp.int32))
        return batch_statistics(step, state, micro)

    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with without_mesh():
        shapes = jax.eval_shape(of_rows, bare, rows)
    return workers.stack(jax.tree.map(lambda x: jnp.zeros((every, *x.shape), x.dtype), shapes))


def remember_statistics(
    past: Past, statistics: RouterStatistics, step: Int[Array, ""], is_skipped: Bool[Array, " R"]
) -> Past:
    """Return the statistics with those of one more step, zeros where it was refused.

    Args:
        past: Statistics of the steps before.
        statistics: Statistics of each worker, [R L ...].
        step: Number of the step, from 1.
        is_skipped: Whether the guard of each worker refused it.
    """

    def put(past: Array, now: Array) -> Array:
        refused = is_skipped.reshape(-1, *(1,) * (now.ndim - 1))
        now = jnp.where(refused, jnp.zeros_like(now), now)
        return jax.lax.dynamic_update_index_in_dim(past, now, step % past.shape[1], 1)

    return jax.tree.map(put, past, statistics)


def total_of(past: Past, step: Int[Array, ""]) -> Total:
    """Return the statistics of all workers in the last H steps, the oldest first.

    Args:
        past: Statistics of each worker.
        step: Number of the last step.
    """
    return jax.tree.map(
        lambda x: jnp.roll(jnp.sum(x, axis=0), -(step + 1) % x.shape[1], axis=0), past
    )


def replay(model: ModelConfig, state: TrainState, total: Total, last: Int[Array, ""]) -> Any:
    """Return the router state after the updates of the last H steps, from that of the world.

    A step without statistics, which was refused or came before the last exchange, updates nothing.

    Args:
        model: Model with the routers.
        state: State of the world.
        total: Statistics of the steps.
        last: Number of the last of them.
    """
    (every, *_) = {leaf.shape[0] for leaf in jax.tree.leaves(total)}

    def update(router_state: Any, numbered: Any) -> tuple[Any, None]:
        number, statistics = numbered
        before = dataclasses.replace(state, router_state=router_state, step=number - 1)
        after = update_routers(model, before, statistics)
        counts = jnp.stack([jnp.any(x != 0) for x in jax.tree.leaves(statistics)]).any()
        return jax.tree.map(partial(jnp.where, counts), after, router_state), None

    numbers = last - every + 1 + jnp.arange(every, dtype=jnp.int32)
    router_state, _ = jax.lax.scan(update, state.router_state, (numbers, total))
    return router_state
