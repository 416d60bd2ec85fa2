# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Observes router logits and the correlation of experts per token, for detailed telemetry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.layers.feed_forwards.moe.config import MoEConfig
from jaxmoe.layers.indicators import mean_cosine, unit_rows
from sharding.assignments import Assignments


def observed_names(moe: MoEConfig) -> tuple[str, ...]:
    """Return the names of the values that `observe_experts` computes for a layer."""
    has_pairs = moe.top_k > 1 and not moe.router.traits.mixes_tokens
    return ("router_max_logit", *(("cosine", "has_pair") if has_pairs else ()))


def observe_experts(
    names: tuple[str, ...],
    tokens: Float[Array, "T D"],
    logits: Float[Array, "T E"],
    assignments: Assignments,
    num_experts: int,
    dispatch: Callable[..., tuple[Array, Array]],
    experts: Callable[..., Array],
    weights: dict[str, Any],
) -> dict[str, Float[Array, " T"]]:
    """Compute the largest router logit of each token and the mean cosine of its experts' outputs.

    The experts run once more, with gates of 1 and outputs of length 1.

    Args:
        names: Names from `observed_names`.
        tokens: Activations.
        logits: Router logits.
        assignments: Assignments to experts that compute.
        num_experts: E, which marks an empty assignment.
        dispatch: Dispatcher of the layer.
        experts: Function of the experts.
        weights: Weights of the experts.

    Returns:
        Values by name; `cosine` is 0 where `has_pair` is.
    """
    tokens, logits, weights = jax.lax.stop_gradient((tokens, logits, weights))
    observed = {"router_max_logit": jnp.max(logits, axis=-1)}
    if "cosine" not in names:
        return observed
    is_kept = (assignments.expert_ids < num_experts).astype(jnp.float32)

    def directions(weights: Any, rows: Array, group_sizes: Array) -> Array:
        return unit_rows(experts(weights, rows, group_sizes))

    alike = dataclasses.replace(assignments, gates=is_kept)
    unit_sum = dispatch(tokens, alike, directions, weights)[0].astype(jnp.float32)
    number = jax.ops.segment_sum(is_kept, assignments.token_ids, tokens.shape[0])
    observed["cosine"], observed["has_pair"] = mean_cosine(unit_sum, number)
    return observed
