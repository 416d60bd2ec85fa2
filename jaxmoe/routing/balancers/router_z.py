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

from jaxmoe.routing.balancers.base import (
    BalanceScope,
    StatisticsBalancerBase,
    check_coefficient,
)
from jaxmoe.routing.base import RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterZConfig(StatisticsBalancerBase):
    """Router z-loss: penalises large logits."""

    name: ClassVar[str] = "router_z"
    evens_load: ClassVar[bool] = False
    scope: ClassVar[BalanceScope] = "global"

    coefficient: float = 1e-3
    """Weight in the loss."""

    def __post_init__(self):
        check_coefficient(self.name, self.coefficient)

    def loss(self, statistics: RouterStatistics, *, num_free: int = 0) -> Float[Array, ""]:
        """Return the weighted loss, summed over layers."""
        del num_free
        return self.coefficient * jnp.sum(router_z(statistics))


def router_z(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Compute the mean squared logsumexp of the router logits, per layer."""
    return statistics.z_sum / jnp.maximum(statistics.num_tokens, 1.0)
