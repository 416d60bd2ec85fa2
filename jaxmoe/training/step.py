# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One optimiser step: gradients over micro-batches, clipping, update, guard.

    loss  = sum of weighted nll / sum of weights  +  the balancers' losses
    guard : loss, gradient norm and new state all finite, or else nothing changes

The guard selects whole states with `where` and never multiplies by zero, so one NaN or an infinite
square cannot leak into parameters, moments, optimiser counters or router state: they stay bitwise
what they were. Only the counters move.

With accumulation the cross-entropy is exactly that of the whole batch; a balancer's loss is the
mean over micro-batches, each over all devices.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.moe import build_router
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RouterStatistics, telemetry
from jaxmoe.training import NextTokenConfig, ObjectiveConfig
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import TrainState
from sharding import axes as ax
from sharding.constrain import Placement


# Records are not checked at run time: tree functions also fill them with shapes and specs.
@typing.no_type_check
@struct.dataclass
class StepMetrics:
    """What a step reports; arrays stay on the device until somebody looks."""

    loss: Float[Array, ""]
    """Cross-entropy, nats per token."""
    losses: dict[str, Float[Array, ""]]
    """Balancers' losses, weighted, summed over layers."""
    grad_norm: Float[Array, ""]
    """Global norm before clipping."""
    num_tokens: Float[Array, ""]
    """Sum of the loss weights."""
    is_skipped: Bool[Array, ""]
    """The guard refused this step."""
    skipped_in_a_row: Array
    """Including this step."""
    router: dict[str, Float[Array, ""]]
    """`telemetry.summarise` of the whole batch; empty for a dense model."""
    load: Float[Array, "L E"] | None
    """Share of the assignments of each expert, per MoE layer."""


@typing.no_type_check
@struct.dataclass
class Gradients:
    """Sums over the micro-batches of one step."""

    grads: Any
    loss: Float[Array, ""]
    losses: dict[str, Float[Array, ""]]
    statistics: RouterStatistics | None

    def __add__(self, other: Gradients) -> Gradients:
        return jax.tree.map(jnp.add, self, other)


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    *,
    execution: ExecutionConfig | None = None,
    accumulation: int = 1,
    clip: float | None = 1.0,
    objective: ObjectiveConfig | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted training step. Its state argument is donated: use only the one returned.

    Args:
        model: what is trained.
        optimizer: an optax transformation.
        execution: how it is computed; defaults when None.
        accumulation: micro-batches per step; must divide the batch.
        clip: largest global gradient norm; None does not clip.
        objective: what is predicted from what; the next token when None.

    Raises:
        ValueError: `accumulation` below 1, `clip` not above 0, or a model that does not fit the
            objective.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation={accumulation} must be at least 1")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be above 0, or None not to clip")
    execution = execution or ExecutionConfig()
    objective = objective or NextTokenConfig()
    objective.check(model)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        weight = objective.num_tokens(batch)
        key = jax.random.fold_in(state.rng, state.step)
        batch = objective.prepare(model, batch, key, execution.placement)
        total_weight = jnp.where(weight > 0.0, weight, 1.0)
        summed = accumulate(
            partial(compute_gradients, model=model, execution=execution, objective=objective),
            state,
            batch,
            total_weight,
            accumulation,
            execution.placement,
        )
        grads, statistics = summed.grads, summed.statistics
        grad_norm = optax.tree.norm(grads)
        if clip is not None:
            scale = jnp.minimum(1.0, clip / jnp.maximum(grad_norm, 1e-12))
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p + u.astype(p.dtype), state.params, updates)
        new = (params, opt_state, update_routers(model, state, statistics))
        old = (state.params, state.opt_state, state.router_state)
        is_good = jnp.isfinite(summed.loss) & jnp.isfinite(grad_norm) & _all_finite(new)
        kept = jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)
        in_a_row = jnp.where(is_good, 0, state.skipped_in_a_row + 1)
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=kept[0],
            opt_state=kept[1],
            router_state=kept[2],
            skipped=state.skipped + (~is_good).astype(jnp.int32),
            skipped_in_a_row=in_a_row,
        )
        metrics = StepMetrics(
            loss=summed.loss,
            losses=summed.losses,
            grad_norm=grad_norm,
            num_tokens=weight,
            is_skipped=~is_good,
            skipped_in_a_row=in_a_row,
            router={} if statistics is None else telemetry.summarise(statistics),
            load=None if statistics is None else telemetry.load(statistics),
        )
        return state, metrics

    return jax.jit(step, donate_argnums=0)


def compute_gradients(
    state: TrainState,
    batch: Batch,
    total_weight: Float[Array, ""],
    share: float,
    *,
    model: ModelConfig,
    execution: ExecutionConfig,
    objective: ObjectiveConfig | None = None,
) -> Gradients:
    """Gradients of one micro-batch's part of the loss.

    Args:
        state: parameters, router state, randomness.
        batch: of this micro-batch.
        total_weight: sum of the loss weights of the whole batch.
        share: of this micro-batch in the balancers' losses.
        model: what is trained.
        execution: how.
        objective: that prepared the batch; the next token when None.
    """
    objective = objective or NextTokenConfig()
    key = jax.random.fold_in(state.rng, state.step)

    def loss_of(params: Any) -> tuple[Array, tuple[Array, dict[str, Array], Any]]:
        nll, output = forward_and_nll(
            model,
            execution,
            params,
            batch,
            num_predicted=objective.num_predicted(model),
            router_state=state.router_state,
            train=True,
            key=key,
        )
        loss = nll / total_weight
        losses = jax.tree.map(lambda value: value * share, output.losses)
        return loss + sum(losses.values()), (loss, losses, output.statistics)

    grads, (loss, losses, statistics) = jax.grad(loss_of, has_aux=True)(state.params)
    statistics = jax.lax.stop_gradient(statistics)
    return Gradients(grads=grads, loss=loss, losses=losses, statistics=statistics)


def accumulate(
    gradients_of: Callable[[TrainState, Batch, Array, float], Gradients],
    state: TrainState,
    batch: Batch,
    total_weight: Float[Array, ""],
    accumulation: int,
    placement: Placement,
) -> Gradients:
    """Sums `gradients_of` over micro-batches; micro-batch i holds rows i, i+accumulation, ...

    Every device then keeps its own rows, and which rows go together does not depend on the mesh.

    Raises:
        ValueError: `accumulation` does not divide the batch.
    """
    if accumulation == 1:
        return gradients_of(state, batch, total_weight, 1.0)
    rows = batch.tokens.shape[0]
    if rows % accumulation:
        raise ValueError(f"accumulation={accumulation} must divide the batch of {rows} sequences")

    def split(array: Array) -> Array:
        strided = array.reshape(rows // accumulation, accumulation, *array.shape[1:])
        micro = jnp.moveaxis(strided, 1, 0)
        return placement.place(micro, (None, ax.ACT_BATCH) + (None,) * (micro.ndim - 2))

    micro = jax.tree.map(split, batch)
    share = 1.0 / accumulation
    first = gradients_of(state, jax.tree.map(lambda a: a[0], micro), total_weight, share)

    def body(total: Gradients, batch: Batch) -> tuple[Gradients, None]:
        return total + gradients_of(state, batch, total_weight, share), None

    total, _ = jax.lax.scan(body, first, jax.tree.map(lambda a: a[1:], micro))
    return total


def update_routers(
    model: ModelConfig, state: TrainState, statistics: RouterStatistics | None
) -> Any:
    """New router state of every MoE layer from the statistics of the whole step."""
    if model.moe is None or statistics is None or not jax.tree.leaves(state.router_state):
        return state.router_state
    router = build_router(model, model.moe)
    return jax.vmap(router.update, in_axes=(0, 0, None))(state.router_state, statistics, state.step)


def _all_finite(tree: Any) -> Bool[Array, ""]:
    # 0 * x is 0, or NaN where x is not finite: a sum is several times as fast as `all(isfinite)`.
    sums = [
        jnp.sum(leaf * jnp.zeros((), leaf.dtype))
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    return jnp.all(jnp.isfinite(jnp.stack([total.astype(jnp.float32) for total in sums])))
