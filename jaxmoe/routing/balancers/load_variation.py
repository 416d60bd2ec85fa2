# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of noisy top-k: squared coefficient of variation of importance and of load.

    importance_i = sum_t gate_ti            gates renormalized over the K chosen
    load_i       = sum_t P(expert i is chosen by token t)         `noisy_topk`, its smooth loads
    L = CV(v)^2 = variance(v) / mean(v)^2 = E sum_i v_i^2 / (sum_i v_i)^2 - 1

0 when all experts are equal, E - 1 when one expert has everything. Importance is a sum of gates and
works with any router; with even importance the load may still be uneven (few tokens with large
gates against many with small ones), hence the second loss, which needs the router `noisy_topk`.

Source: arXiv 1701.06538, section 4 and appendix A; the variance is that of the population.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.routing.balancers.base import BalancerTraits, StatisticsBalancer
from jaxmoe.routing.base import Arrays, RouterInputs, RouterOutput, RouterStatistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceVariationConfig(StatisticsBalancer):
    """Squared coefficient of variation of the experts' summed gates."""

    name: ClassVar[str] = "importance_variation"

    coefficient: float = 0.1
    """Weight in the loss; the unweighted value is 0 when all experts are equal."""

    def observe(self, output: RouterOutput, inputs: RouterInputs) -> Arrays:
        """Return `importance [E]`, the sum over tokens of their renormalized gates."""
        tokens = inputs.x.shape[0]
        num_experts = output.logits.shape[1]
        slots = output.selection.expert_ids.size // max(tokens, 1)
        ids = output.selection.expert_ids.reshape(tokens, slots)  # T, K
        log_scores = output.selection.scores.reshape(tokens, slots)
        is_chosen = ids < num_experts
        # A finite value for empty slots keeps the slope of a token without experts finite.
        shares = jax.nn.softmax(jnp.where(is_chosen, log_scores, -1e30), axis=-1)
        shares = jnp.where(is_chosen, shares, 0.0)
        experts = jnp.arange(num_experts, dtype=ids.dtype)[None, None, :]
        is_of = ids[:, :, None] == experts
        return {"importance": jnp.sum(shares[:, :, None], axis=(0, 1), where=is_of)}

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer."""
        del num_free
        return squared_variation(statistics.extra["importance"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadVariationConfig(StatisticsBalancer):
    """Squared coefficient of variation of the smooth loads of `noisy_topk`."""

    name: ClassVar[str] = "load_variation"

    coefficient: float = 0.1
    """Weight in the loss; the unweighted value is 0 when all loads are equal."""

    @property
    def traits(self) -> BalancerTraits:
        """Evens the smooth load."""
        return BalancerTraits(evens_load=True, needs_smooth_load=True)

    def per_layer(self, statistics: RouterStatistics, *, num_free: int) -> Float[Array, "*L"]:
        """Return the unweighted loss of each layer."""
        del num_free
        return squared_variation(statistics.extra["smooth_load"])


def squared_variation(values: Float[Array, "*L E"]) -> Float[Array, "*L"]:
    """Compute the variance over the squared mean, per layer; 0 where the mean is 0."""
    mean = values.mean(-1, keepdims=True)
    share = jnp.where(mean > 0.0, values / jnp.where(mean > 0.0, mean, 1.0), 1.0)
    return jnp.mean((share - 1.0) ** 2, axis=-1)
