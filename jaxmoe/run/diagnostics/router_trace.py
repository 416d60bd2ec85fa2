# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records a routing trace of a model on held-out batches, for placement solvers and item caches.

Runs the forward pass of an evaluation on the current mesh until there are `MOST_TOKENS` tokens. The
file format is in `jaxmoe/planning/placement/trace.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxmoe.data import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.planning.placement import RoutingTrace
from jaxmoe.routing.telemetry.recording import recorded, recorded_ids
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.diagnostics.router_statistics import router_statistics
from jaxmoe.training.state import TrainState

MOST_TOKENS = 65_536


def record_trace(
    model: ModelConfig,
    execution: ExecutionConfig,
    params: Any,
    router_state: Any,
    batches: Iterable[Batch],
    *,
    most_tokens: int = MOST_TOKENS,
) -> RoutingTrace:
    """Record the experts of the real tokens of some batches.

    Args:
        model: Trained model.
        execution: Execution of the model.
        params: Parameters of the model.
        router_state: Router state, stacked over MoE layers.
        batches: Batches of one shape without masked tokens.
        most_tokens: Number of tokens after which no further batch is read.

    Raises:
        ValueError: The model has no MoE layer, or a router in which tokens do not choose.
    """
    moe = model.moe
    if moe is None or not model.num_moe_layers:
        raise ValueError("the model has no MoE layer: there is no routing to record")
    token_ids, expert_ids = [], []
    for batch in batches:
        tokens = np.asarray(batch.tokens)
        watched = dataclasses.replace(model, moe=recorded(moe, tokens.size))
        statistics = router_statistics(watched, execution, params, router_state, batch)
        chosen = recorded_ids(jax.device_get(statistics))
        is_real = np.ones(tokens.size, bool)
        if batch.segment_ids is not None:
            is_real = np.asarray(batch.segment_ids).ravel() != 0
        token_ids.append(tokens.ravel()[is_real])
        # Experts without computation are on every device and are not dispatched.
        expert_ids.append(np.minimum(chosen[:, is_real], moe.num_experts))
        if sum(map(len, token_ids)) >= most_tokens:
            break
    ids = np.concatenate(expert_ids, axis=1)[:, :most_tokens]
    return RoutingTrace(np.concatenate(token_ids)[:most_tokens], ids, moe.num_experts)


def record_run(assembly: Assembly, state: TrainState) -> RoutingTrace:
    """Record the experts of the held-out tokens of a run, on its mesh.

    Args:
        assembly: Run with its data.
        state: State of a checkpoint.
    """
    with jax.set_mesh(assembly.mesh):
        return record_trace(
            assembly.plan.model,
            assembly.execution,
            state.params,
            state.router_state,
            assembly.held_out(),
        )
