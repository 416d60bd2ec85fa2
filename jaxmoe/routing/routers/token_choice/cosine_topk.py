# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""X-MoE: token choice by cosine similarity in a low-rank space, with a learned temperature.

    z_ti = cos(x_t P, e_i) / tau,   score_ti = softmax_E(z_t)_i
    P [D R], e [R E],   1/tau = exp(log_scale) / temperature, at most 100

The logits depend neither on the norm of x nor on those of the experts' vectors; the low rank keeps
the hidden states from collapsing onto the experts' vectors. R defaults to E / 2, as in the paper.
Two details follow Tutel and keep tau away from 0: the bound on 1/tau, and the trained log_scale in
place of tau. With a group limit the preference is the probability.

Source: arXiv 2204.09179, section 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import Arrays, Key, RouterInputs
from jaxmoe.routing.biases.base import SelectionBias
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoiceBase,
    score_logits,
)
from sharding import axes as ax

MAX_INVERSE_TEMPERATURE = 100.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CosineTopKConfig(TokenChoiceBase):
    """The K experts of largest cosine with a projection of the token."""

    name: ClassVar[str] = "cosine_topk"

    router_dim: int | None = None
    """Width R of the space in which directions are compared; E / 2 when None."""
    temperature: float = 0.3
    """Temperature tau at initialisation; it is learned."""
    bias: SelectionBias | None = None
    """Added to the probabilities for the choice alone."""
    groups: GroupLimitConfig | None = None
    """Limits a token's experts to few groups of neighbours."""

    def __post_init__(self):
        if self.router_dim is not None and self.router_dim < 1:
            raise ValueError(
                f"router.router_dim={self.router_dim} must be at least 1, or None for E / 2"
            )
        lowest = 1.0 / MAX_INVERSE_TEMPERATURE
        if not lowest <= self.temperature < float("inf"):
            raise ValueError(
                f"router.temperature={self.temperature} must be finite and at least {lowest}"
            )

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Return the projection, the experts' vectors and the logarithm of the scale."""
        width = self.router_dim or max(1, num_experts // 2)
        return {
            "projection": Declaration(
                shape=(embed_dim, width), axes=(ax.EMBED, ax.ROUTER_DIM), role="router"
            ),
            "experts": Declaration(
                shape=(width, num_experts), axes=(ax.ROUTER_DIM, ax.ROUTER_OUT), role="router"
            ),
            "log_scale": Declaration(
                shape=(1,), axes=(ax.NORM,), role="norm", matrix=None, init="zeros"
            ),
        }

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Return the softmax of the cosines over the temperature."""
        del top_k, train, key
        x, project, experts = (
            array.astype(jnp.float32)
            for array in (inputs.x, params["projection"], params["experts"])
        )
        low = jnp.einsum("td,dr->tr", x, project, preferred_element_type=jnp.float32)
        cosine = jnp.einsum(
            "tr,re->te",
            _normalize(low, axis=1),
            _normalize(experts, axis=0),
            preferred_element_type=jnp.float32,
        )
        start = math.log(1.0 / self.temperature)
        log_scale = params["log_scale"].astype(jnp.float32) + start
        scale = jnp.exp(jnp.minimum(log_scale, math.log(MAX_INVERSE_TEMPERATURE)))
        logits = cosine * scale[:, None]  # [1 1]
        return score_logits(logits, "softmax", groups=self.groups)


def _normalize(vectors: Float[Array, "n m"], axis: int) -> Float[Array, "n m"]:
    """Return the vectors scaled to length 1; zero vectors stay zero."""
    # Dividing by the largest entry first keeps the squares from over- and underflowing.
    size = jax.lax.stop_gradient(jnp.abs(vectors).max(axis, keepdims=True))
    vectors = vectors / jnp.where(size > 0.0, size, 1.0)
    return vectors * jax.lax.rsqrt(jnp.maximum(jnp.sum(vectors**2, axis, keepdims=True), 0.5))
