# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Observes routers and experts for detailed telemetry: logits and the correlations of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.contrib.telemetry.geometry import correlation, squared_norms
from jaxmoe.contrib.telemetry.indicators import mean_cosine, unit_rows
from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.observer import ExpertCall, Observations
from jaxmoe.layers.records import RoutingInputs
from sharding import axes as ax
from sharding.constrain import Placement


def observed_axes(
    moe: MoEConfig, axes: tuple[str | None, ...]
) -> dict[str, tuple[str | None, ...]]:
    """Return the names of the values that `observe_experts` computes, with their logical axes.

    Args:
        moe: Configuration of the layer.
        axes: Logical axes [B s] of the results of the layer.
    """
    traits = moe.router.traits
    axes_by_name: dict[str, tuple[str | None, ...]] = {"router_max_logit": axes}
    if moe.top_k > 1 and not traits.mixes_tokens:
        axes_by_name |= {"cosine": axes, "has_pair": axes}
    if not traits.mixes_tokens:
        axes_by_name["logits"] = (*axes, None)
    return axes_by_name


def observe_experts(
    names: Collection[str], call: ExpertCall, num_experts: int
) -> dict[str, Float[Array, "T ..."]]:
    """Compute the router logits of each token and the mean cosine of its experts' outputs.

    The experts run once more, with gates of 1 and outputs of length 1.

    Args:
        names: Names from `observed_axes`.
        call: Experts with their tokens.
        num_experts: E, which marks an empty assignment.

    Returns:
        Values by name; `cosine` is 0 where `has_pair` is.
    """
    tokens, logits, weights = jax.lax.stop_gradient((call.tokens, call.logits, call.weights))
    assignments, expert_tensor = call.assignments, call.expert_tensor
    observed = {"router_max_logit": jnp.max(logits, axis=-1)}
    if "logits" in names:
        observed["logits"] = logits
    if "cosine" not in names:
        return observed
    is_kept = (assignments.expert_ids < num_experts).astype(jnp.float32)

    def directions(weights: Any, rows: Array, group_sizes: Array, gates: Array) -> Array:
        del gates  # 1 where there is an output
        rows = call.experts(weights, rows, group_sizes)
        if not expert_tensor:
            return unit_rows(rows)
        # Lengths are those of the sums; the dispatcher adds what the devices return.
        unit_directions = unit_rows(jax.lax.psum(rows.astype(jnp.float32), expert_tensor))
        return jnp.where(jax.lax.axis_index(expert_tensor) == 0, unit_directions, 0.0)

    alike = dataclasses.replace(assignments, gates=is_kept)
    unit_sum = call.dispatch(tokens, alike, directions, weights)[0].astype(jnp.float32)
    number = jax.ops.segment_sum(is_kept, assignments.token_ids, tokens.shape[0])
    observed["cosine"], observed["has_pair"] = mean_cosine(unit_sum, number)
    return observed


def observe_activations(
    x: Float[Array, "B S D"],
    logits: Float[Array, "B S E"],
    gate_up: Float[Array, "e D 2 F"],
    routing: RoutingInputs,
    placement: Placement,
) -> Observations:
    """Return the correlation of router logit and norm of the gate neurons; see `geometry.py`.

    It is taken over the tokens of the first row of the step, for which all experts compute their
    gate neurons: E / (3 B K) of the cost of the experts. Other micro-batches count nothing.

    Args:
        x: Normed input of the layer, in the compute dtype.
        logits: Router logits; those of experts without computation come last.
        gate_up: Weights of the experts, as stored.
        routing: Padding and the `index` of the tokens.
        placement: Operations that place arrays.
    """
    x, logits, gate_up = jax.lax.stop_gradient((x, logits, gate_up))
    (rows, length), num_experts = x.shape[:2], gate_up.shape[0]
    cut_units = placement.mesh_axes(ax.EXPERT_MLP)
    cut = (ax.ACT_BATCH, ax.ACT_SEQ)
    replicated = (None, None)
    row_numbers = jnp.arange(rows * length, dtype=jnp.int32).reshape(rows, length)
    index = routing.context.get("index", row_numbers)
    is_first = placement.place(index < length, cut) & placement.place(routing.token_mask, cut)

    def first_row(values: Array) -> Float[Array, "S n"]:
        values = placement.place(values, (*cut, None)).astype(jnp.float32)
        return placement.place(jnp.sum(values, axis=0, where=is_first[:, :, None]), replicated)

    def norms(x: Array, gate: Array, *, batch_axes: tuple[str, ...]) -> Array:
        del batch_axes
        squares = squared_norms(x, gate)
        return jnp.sqrt(jax.lax.psum(squares, cut_units) if cut_units else squares)

    specs = (replicated, (ax.EXPERTS, None, ax.EXPERT_MLP))
    region = placement.region(norms, in_axes=specs, out_axes=(None, ax.EXPERTS))
    computed = region(first_row(x).astype(x.dtype), gate_up[:, :, 0].astype(x.dtype))
    is_real = placement.place(jnp.any(is_first, axis=0), (None,))
    scores = first_row(logits)[:, :num_experts]
    mean = correlation(scores, placement.place(computed, replicated), is_real).mean()
    has_tokens = jnp.any(is_real).astype(jnp.float32)
    return Observations(
        sums={"activation_correlation": has_tokens * mean},
        counts={"activation_correlation": has_tokens},
        peaks={},
    )
