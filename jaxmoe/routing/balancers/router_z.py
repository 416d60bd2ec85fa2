# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Router z-loss: the mean over tokens of (logsumexp of the logits)^2, which keeps them small.

Source: ST-MoE (arXiv 2202.08906, eq. 5).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import BalanceScope, check_coefficient
from jaxmoe.routing.base import RouterInputs, RouterOutput, RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterZConfig:
    """Router z-loss: keeps the logits small."""

    name: ClassVar[str] = "router_z"
    reads: ClassVar[Literal["statistics"]] = "statistics"
    evens_load: ClassVar[bool] = False
    scope: ClassVar[BalanceScope] = "global"

    coefficient: float = 1e-3
    """Weight in the loss."""

    def __post_init__(self):
        check_coefficient(self.name, self.coefficient)

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> dict[str, Array]:
        """Nothing beyond the sums that are always taken."""
        del output, inputs
        return {}

    def loss(self, statistics: RouterStatistics, *, num_free: int = 0) -> Float[Array, ""]:
        """Weighted, summed over layers."""
        del num_free
        return self.coefficient * jnp.sum(router_z(statistics))


def router_z(statistics: RouterStatistics) -> Float[Array, "*L"]:
    """Mean squared logsumexp of the router logits, per layer."""
    return statistics.z_sum / jnp.maximum(statistics.num_tokens, 1.0)
