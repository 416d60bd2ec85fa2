# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What to watch of a router, from its additive statistics alone.

load            counts / sum(counts); 1/E is fair
max violation   max(counts) / mean(counts) - 1; 0 is balanced
load entropy    H(load) / log E; 1 is balanced
router entropy  mean over tokens of H(p) / log E
dropped         1 - sum(kept) / sum(counts)
dead            share of experts without a token
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers import load_balance, pool_layers, router_z
from jaxmoe.routing.base import RouterStatistics


def load(statistics: RouterStatistics) -> Float[Array, "*L E"]:
    """Share of the assignments that each expert was given, before drops."""
    total = jnp.maximum(statistics.counts.sum(-1, keepdims=True), 1.0)
    return statistics.counts / total


def max_violation(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """How far the fullest expert lies above the mean load (arXiv 2408.15664, eq. 4)."""
    return load(statistics).max(-1) * statistics.counts.shape[-1] - 1.0


def dropped_fraction(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Share of the assignments that were dropped for lack of capacity."""
    return 1.0 - statistics.kept.sum(-1) / jnp.maximum(statistics.counts.sum(-1), 1.0)


def summarise(statistics: RouterStatistics) -> dict[str, Float[Array, ""]]:
    """Scalars over all layers: the mean, and the worst layer where that matters.

    Args:
        statistics: summed over the batch, stacked over layers.
    """
    share, num_experts = load(statistics), statistics.counts.shape[-1]
    log_experts = jnp.log(jnp.float32(max(num_experts, 2)))
    load_entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=-1) / log_experts
    tokens = jnp.maximum(statistics.num_tokens, 1.0)
    violation = max_violation(statistics)
    return {
        "load_balance": load_balance(statistics).mean(),
        "load_balance_pooled": load_balance(pool_layers(statistics)),
        "router_z": router_z(statistics).mean(),
        "max_violation": violation.mean(),
        "max_violation_worst": violation.max(),
        "load_entropy": load_entropy.mean(),
        "router_entropy": (statistics.entropy_sum / tokens).mean() / log_experts,
        "dropped_fraction": dropped_fraction(statistics).mean(),
        "dead_fraction": jnp.mean(statistics.counts == 0.0, dtype=jnp.float32),
    }
