# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""GShard: two experts per token, the second dropped at random.

    g = softmax(x W),   g_1, g_2 the two largest, divided by their sum
    in training the second is used with probability min(1, 2 g_2); in evaluation always

A dropped second expert leaves an empty slot and is not counted as load; g_1 is not renormalised, so
the gates are the router's own. The paper does not specify evaluation: using both experts, which is
deterministic, is the reading chosen here. The paper's capacity is `capacity` with a factor of 1 and
`keep="position"`, except that the paper fills all first choices before the second ones, and
`capacity` fills the slots token by token.

Source: arXiv 2006.16668, section 2.2 and algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxmoe.routing.base import Arrays, Key, RouterBase, RouterInputs, RouterOutput, Traits
from jaxmoe.routing.routers.linear import (
    SizedRouter,
    linear_logits,
    token_output,
)
from jaxmoe.routing.routers.noise import token_noise


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GShardConfig(RouterBase):
    """The two experts of highest logit, the second dropped at random."""

    name: ClassVar[str] = "gshard"

    @property
    def traits(self) -> Traits:
        """Causal; draws random numbers; its scores are the gates."""
        return Traits(has_own_gates=True, needs_key=True)


@dataclasses.dataclass(frozen=True)
class GShard(SizedRouter):
    """The router.

    Raises:
        ValueError: `top_k` is not 2.
    """

    def __post_init__(self):
        SizedRouter.__post_init__(self)
        if self.top_k != 2:
            raise ValueError(
                f"top_k={self.top_k}: the router gshard has a first and a second expert: set top_k"
                " to 2 or take another router"
            )

    def route(
        self, params: Arrays, state: Any, inputs: RouterInputs, *, train: bool, key: Key
    ) -> RouterOutput:
        """Choose the best expert of each token, and the second with its probability."""
        del state
        logits = linear_logits(params, inputs)
        _, expert_ids = jax.lax.top_k(jax.lax.stop_gradient(logits), 2)
        log_gates = jax.nn.log_softmax(jnp.take_along_axis(logits, expert_ids, axis=1), axis=1)
        if train:
            chance = 2.0 * jnp.exp(jax.lax.stop_gradient(log_gates[:, 1:]))
            is_used = token_noise(key, inputs, 1, "uniform") < chance
            is_used = jnp.concatenate([jnp.ones_like(is_used), is_used], axis=1)
            expert_ids = jnp.where(is_used, expert_ids, self.num_experts)
            log_gates = jnp.where(is_used, log_gates, -jnp.inf)
        probs = jax.nn.softmax(logits, axis=-1)
        return token_output(expert_ids, log_gates, inputs, logits=logits, probs=probs)


GShardConfig.router = GShard
