# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies the gradients of a step to the parameters, and its statistics to the routers."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ParameterTable
from jaxmoe.routing import RouterStatistics
from jaxmoe.scaling.initialize import lay_out
from jaxmoe.training.state import TrainState
from sharding.constrain import place_like


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


def update_routers(
    model: ModelConfig, state: TrainState, statistics: RouterStatistics | None
) -> Any:
    """Return the new router state of every MoE layer from the statistics of the step."""
    if model.moe is None or statistics is None or not jax.tree.leaves(state.router_state):
        return state.router_state
    router = model.moe.build_router(model.embed_dim)
    return jax.vmap(router.update, in_axes=(0, 0, None))(state.router_state, statistics, state.step)
