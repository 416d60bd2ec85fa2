# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Router z-loss: the mean over tokens of (logsumexp of the logits)^2, which limits the logits.

Source: ST-MoE (arXiv 2202.08906, eq. 5).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import BalancerTraits, StatisticsBalancer
from jaxmoe.routing.base import RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterZConfig(StatisticsBalancer):
    """Router z-loss: penalises large logits."""

    name: ClassVar[str] = "router_z"

    coefficient: float = 1e-3
    """Weight in the loss."""

    @property
    def traits(self) -> BalancerTraits:
        """Limits the logits, whatever the load."""
        return BalancerTraits()

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer."""
        del num_free
        return router_z(statistics)


def router_z(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Compute the mean squared logsumexp of the router logits, per layer."""
    return statistics.z_sum / jnp.maximum(statistics.num_tokens, 1.0)
