# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Balance loss of Sigma-MoE for one expert per token:

    L = E * sum_i f_i^2 / p_1,   f_i = mean_t softmax(z_t / tau)_i,   p_1 = mean_t max_i p_ti

Both f and p_1 are differentiable. L is 1 for an even one-hot router, and E both for a collapsed and
for a uniform router: unlike the usual loss it penalises uniform probabilities.

Source: arXiv 2512.16248, discussion; the paper gives no coefficient, and the default is our choice.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import StatisticsBalancer
from jaxmoe.routing.base import Arrays, RouterInputs, RouterOutput, RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TopOneBalanceConfig(StatisticsBalancer):
    """Even load and confident choices, for one expert per token."""

    name: ClassVar[str] = "top_one_balance"

    coefficient: float = 0.01
    """Weight in the loss; the unweighted value is 1.0 for an even one-hot router."""
    temperature: float = 1.0
    """Temperature tau of f; the lower, the closer f is to the load."""

    def __post_init__(self):
        StatisticsBalancer.__post_init__(self)
        if not self.temperature > 0.0:
            raise ValueError(f"{self.name}.temperature={self.temperature} must be above 0")

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return the sums of the sharpened and of the largest probabilities."""
        mask = inputs.token_mask
        sharp = jax.nn.softmax(output.logits / self.temperature, axis=-1)
        return {
            "sharp_prob_sum": jnp.sum(sharp, axis=0, where=mask[:, None]),
            "top_prob_sum": jnp.sum(output.probs.max(-1), where=mask),
        }

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer; 0 if there are no tokens but padding."""
        del num_free
        tokens = jnp.maximum(statistics.num_tokens, 1.0)
        share = statistics.extra["sharp_prob_sum"] / tokens[..., None]
        certainty = statistics.extra["top_prob_sum"] / tokens
        return share.shape[-1] * jnp.sum(share**2, axis=-1) / jnp.maximum(certainty, 1e-9)
