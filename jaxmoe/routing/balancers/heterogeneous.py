# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balance loss of MoE++, for layers in which some experts compute nothing:

    L = c * sum_i w_i f_i P_i,   w_i = 1 with computation, tau without,   c = N^2 / sum_i w_i

over N = E + Z experts, with f and P as in `load_balance`. The minimum is at loads proportional to
1 / w: an expert that computes has tau times the load of one that does not, and the experts that
compute get the share tau E / (tau E + Z) of all assignments.

The factor c makes the loss 1 for a uniform router, the unit of this library. The paper has c = 1
and f over T instead of T K: its coefficient of 0.01 is 0.01 K sum_i w_i / N^2 here.

Source: arXiv 2410.07348, eq. 7.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import StatisticsBalancer
from jaxmoe.routing.base import RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeterogeneousBalanceConfig(StatisticsBalancer):
    """Even load among experts that compute, and 1 / computing_share of it for others."""

    name: ClassVar[str] = "heterogeneous"

    coefficient: float = 0.01
    """Weight in the loss; the unweighted value is 1.0 for a uniform router."""
    computing_share: float = 0.75
    """Target tau: load of an expert that computes over that of one that does not."""

    def __post_init__(self):
        StatisticsBalancer.__post_init__(self)
        if not 0.0 < self.computing_share < float("inf"):
            raise ValueError(
                f"{self.name}.computing_share={self.computing_share} must be finite and above 0"
            )

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer."""
        counts = jax.lax.stop_gradient(statistics.counts)
        number = counts.shape[-1]
        is_free = jnp.arange(number) >= number - num_free
        weights = jnp.where(is_free, jnp.float32(self.computing_share), jnp.float32(1.0))
        share = counts / jnp.maximum(counts.sum(-1, keepdims=True), 1.0)
        prob = statistics.prob_sum / jnp.maximum(statistics.num_tokens, 1.0)[..., None]
        return (
            number**2
            / weights.sum()
            * jnp.sum(share * prob * jnp.broadcast_to(weights, share.shape), axis=-1)
        )
