# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balancers: what keeps the experts evenly loaded, as functions of the summed statistics.

Load-balancing loss of one layer, over the tokens whose statistics were summed:

    L = E * sum_i f_i P_i,   f_i = counts_i / sum(counts),   P_i = prob_sum_i / num_tokens

f carries no gradient. L is 1 for a uniform router: the unit of the whole library. `conversions`
gives the same number in the units of others. Summed over all devices first (one psum), it is the
loss of the global batch, the same on every mesh.

Router z-loss: mean over tokens of (logsumexp of the logits)^2.

Losses of several layers are added, not averaged: the coefficient is per layer.

Sources: Switch Transformers (arXiv 2101.03961, eq. 4), global batch (arXiv 2501.11873), z-loss
ST-MoE (arXiv 2202.08906, eq. 5).

To add a balancer: a config with `name` and `loss`, into BalancerConfig in
`jaxmoe/routing/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.base import RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadBalanceConfig:
    """Load-balancing loss over the global batch."""

    name: ClassVar[str] = "load_balance"

    coefficient: float = 0.01
    """Weight in the loss; the unweighted value is 1.0 for a uniform router."""

    def __post_init__(self):
        _check_coefficient(self.name, self.coefficient)

    def loss(self, statistics: RouterStatistics) -> Float[Array, ""]:
        """Weighted, summed over layers."""
        return self.coefficient * jnp.sum(load_balance(statistics))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterZConfig:
    """Router z-loss: keeps the logits small."""

    name: ClassVar[str] = "router_z"

    coefficient: float = 1e-3
    """Weight in the loss."""

    def __post_init__(self):
        _check_coefficient(self.name, self.coefficient)

    def loss(self, statistics: RouterStatistics) -> Float[Array, ""]:
        """Weighted, summed over layers."""
        return self.coefficient * jnp.sum(router_z(statistics))


def _check_coefficient(name: str, coefficient: float) -> None:
    if not 0.0 <= coefficient < float("inf"):
        raise ValueError(f"coefficient={coefficient} of {name} must be finite and not negative")


def load_balance(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """The load-balancing loss per layer, unweighted; 1.0 for a uniform router.

    Args:
        statistics: summed over the batch in question; may be stacked over layers.

    Returns:
        One number per layer; 0 when there is no real token.
    """
    counts = jax.lax.stop_gradient(statistics.counts)
    share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
    prob = statistics.prob_sum / jnp.maximum(statistics.num_tokens, 1.0)[..., None]
    return counts.shape[-1] * jnp.sum(share * prob, axis=-1)


def router_z(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Mean squared logsumexp of the router logits, per layer."""
    return statistics.z_sum / jnp.maximum(statistics.num_tokens, 1.0)


def pool_layers(statistics: RouterStatistics) -> RouterStatistics:
    """The statistics of all layers as if they were one, for losses that do not tell them apart.

    Args:
        statistics: summed over the batch in question; may be stacked over layers.
    """
    layers = tuple(range(statistics.num_tokens.ndim))
    return jax.tree.map(lambda leaf: leaf.sum(layers), statistics)


def conversions(value: float, *, top_k: int, pooled: float | None = None) -> dict[str, float]:
    """The balance loss in other projects' units, before their coefficients.

    Args:
        value: ours, 1.0 for a uniform router: of one layer, or the mean over layers.
        top_k: K.
        pooled: ours of all layers taken as one, `load_balance(pool_layers(statistics))`; needed
            for `huggingface` where there are several, and the same as `value` where there is one.

    Returns:
        `megatron` and `megablocks` count assignments as we do; Megatron adds the layers, as we do
        in the loss, and MegaBlocks averages them. `huggingface` (transformers 5.23) takes the
        tokens of all layers together, so that layers with opposite preferences look balanced, and
        counts tokens, so that a uniform router has K: K * pooled.
    """
    return {
        "jaxmoe": value,
        "megatron": value,
        "megablocks": value,
        "huggingface": (value if pooled is None else pooled) * top_k,
    }
