# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""GShard: two experts, the second one left out at random.

    g = softmax(x W),   g_1, g_2 the two largest, divided by their sum
    in training the second is used with probability min(1, 2 g_2); in evaluation always

A second expert that hardly counts so costs nothing most of the time. What is left out leaves an
empty slot and is no load; g_1 stays what it was, for which reason these gates are the router's own.
The paper says nothing of evaluation: using both, which is deterministic, is our reading. Its
capacity is `capacity` with a factor of 1 and `keep="position"`, which here goes through a
sequence's slots token by token, and there through all first choices before the second ones.

Source: arXiv 2006.16668, section 2.2 and algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmoe.parameters import Declaration, draw
from jaxmoe.routing.base import RouterInputs, RouterOutput, RouterStatistics, Traits
from jaxmoe.routing.routers.noise import token_noise
from jaxmoe.routing.routers.token_choice.token_choice import (
    check_sizes,
    linear_declarations,
    linear_logits,
    token_output,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GShardConfig:
    """The two experts of highest logit, the second by chance."""

    name: ClassVar[str] = "gshard"

    @property
    def traits(self) -> Traits:
        """Causal; draws numbers; brings its gates."""
        return Traits(has_own_gates=True, needs_key=True)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> GShard:
        """The router for these sizes.

        Raises:
            ValueError: K is not 2.
        """
        check_sizes(num_experts=num_experts, top_k=top_k)
        if top_k != 2:
            raise ValueError(
                f"top_k={top_k}: the router gshard has a first and a second expert: set top_k to 2"
                " or take another router"
            )
        return GShard(num_experts, top_k, embed_dim)


@dataclasses.dataclass(frozen=True)
class GShard:
    """The router."""

    num_experts: int
    top_k: int
    embed_dim: int

    def declarations(self) -> dict[str, Declaration]:
        """One matrix."""
        return linear_declarations(num_experts=self.num_experts, embed_dim=self.embed_dim)

    def init(self, key: Array) -> tuple[dict[str, Array], Any]:
        """Random parameters, no state."""
        return draw(self.declarations(), key), {}

    def route(
        self,
        params: dict[str, Array],
        state: Any,
        inputs: RouterInputs,
        *,
        train: bool,
        key: Array | None,
    ) -> RouterOutput:
        """The best expert of each token, and mostly the second."""
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

    def update(self, state: Any, statistics: RouterStatistics, step: Array) -> Any:
        """Nothing is kept."""
        del statistics, step
        return state
