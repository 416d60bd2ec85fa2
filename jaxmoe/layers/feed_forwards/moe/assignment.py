# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns what a router returns into assignments: gates, capacity, and what balancers observe."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.routing import Extent, RouterInputs, RouterOutput, RouterStatistics
from jaxmoe.routing.balancers import of_statistics
from jaxmoe.routing.capacity import limit
from jaxmoe.routing.replay import EXPERTS
from jaxmoe.routing.telemetry.detailed import observe
from sharding.assignments import Assignments
from sharding.expert_parallel.permute import loads


def router_inputs(
    tokens: Float[Array, "T D"], given: Any, multiplier: float, extent: Extent
) -> RouterInputs:
    """Return the inputs of a router, whose [B S] arrays become [T], of recorded experts [T K].

    Args:
        tokens: Activations.
        given: `LocalInputs` of the island.
        multiplier: Factor of the router logits.
        extent: Place of the tokens in the batch.
    """
    context, replayed = dict(given.context), None
    if EXPERTS in context:
        experts = context.pop(EXPERTS).astype(jnp.int32)
        replayed = jax.lax.dynamic_index_in_dim(experts, given.layer, axis=2, keepdims=False)
        replayed = replayed.reshape(tokens.shape[0], -1)
    context = {name: array.reshape(-1) for name, array in context.items()}
    if not isinstance(given.layer, dict):
        context["layer"] = given.layer
    previous = given.previous_logits
    has_previous = not isinstance(previous, dict)
    return RouterInputs(
        x=tokens.astype(jnp.float32) * jnp.float32(multiplier),
        token_mask=given.token_mask.reshape(-1),  # T
        segment_ids=given.segment_ids.reshape(-1),  # T
        previous_logits=previous.reshape(tokens.shape[0], -1) if has_previous else None,
        context=context,
        replayed=replayed,
        extent=extent,
    )


def assign(
    output: RouterOutput,
    inputs: RouterInputs,
    moe: MoEConfig,
    length: int,
    *,
    is_detailed: bool,
) -> tuple[Assignments, RouterStatistics]:
    """Apply the gate and the capacity to a router's selection.

    Args:
        output: Output of the router.
        inputs: Its inputs.
        moe: Gate, capacity and balancers.
        length: Positions of a sequence.
        is_detailed: Whether the statistics hold the detailed telemetry.

    Returns:
        The assignments of tokens to experts, and the statistics of this device's tokens.
    """
    selection, statistics = output.selection, output.statistics
    assignments = Assignments(
        token_ids=selection.token_ids,
        expert_ids=selection.expert_ids,
        gates=moe.gate.build()(selection, selection.scores),
        top_k=selection.top_k,
    )
    if moe.capacity is not None:
        assignments = limit(
            assignments,
            moe.capacity,
            sequence_length=length,
            num_experts=moe.num_experts,
            num_free=moe.num_routed - moe.num_experts,
        )
        kept = loads(assignments.expert_ids, moe.num_routed).astype(jnp.float32)
        statistics = dataclasses.replace(statistics, kept=kept)
    extra = statistics.extra
    for balancer in of_statistics(moe.balancers):
        extra = extra | balancer.observe(output, inputs)
    if is_detailed:
        extra = extra | observe(output, inputs)
    return assignments, dataclasses.replace(statistics, extra=extra)


def with_computation(assignments: Assignments, num_experts: int) -> Assignments:
    """Empty the assignments to experts without computation, so that they are not dispatched.

    Args:
        assignments: Assignments to all experts.
        num_experts: Experts that compute; those without computation have higher numbers.
    """
    is_computed = assignments.expert_ids < num_experts
    return dataclasses.replace(
        assignments,
        expert_ids=jnp.where(is_computed, assignments.expert_ids, num_experts),
        gates=jnp.where(is_computed, assignments.gates, 0.0),
    )
