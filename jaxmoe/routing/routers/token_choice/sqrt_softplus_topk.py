# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice by the square root of softplus: as `sigmoid_topk`, with scores that do not saturate.

    z = x W,   score_ti = sqrt(log(1 + exp(z_ti))),   p_ti = score_ti / sum_j score_tj

A score grows as sqrt(z) and may exceed 1; its logarithm is z / 2 far below 0.

Source: the score function `sqrtsoftplus` of Megatron-LM and of MaxText's DeepSeek-V4 configs.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.parameters import Declaration
from jaxmoe.routing.base import RouterInputs, Traits
from jaxmoe.routing.biases import BiasConfig
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoice,
    check_jitter,
    linear_declarations,
    linear_logits,
    traits_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SqrtSoftplusTopKConfig:
    """The K experts of highest sqrt(softplus) score."""

    name: ClassVar[str] = "sqrt_softplus_topk"

    bias: BiasConfig | None = None
    """Added to the scores for the choice alone."""
    groups: GroupLimitConfig | None = None
    """Limits a token's experts to few groups of neighbours."""
    jitter: float = 0.0
    """In training the input is multiplied by uniform numbers in 1 - jitter to 1 + jitter."""

    def __post_init__(self):
        check_jitter(self.jitter)

    @property
    def traits(self) -> Traits:
        """Causal; draws numbers only for jitter."""
        return traits_of(self.bias, self.jitter)

    def build(self, *, num_experts: int, top_k: int, embed_dim: int) -> TokenChoice:
        """The router for these sizes."""
        return TokenChoice(self, num_experts, top_k, embed_dim)

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """One matrix."""
        return linear_declarations(num_experts=num_experts, embed_dim=embed_dim)

    def score(
        self,
        params: dict[str, Array],
        inputs: RouterInputs,
        *,
        top_k: int,
        train: bool,
        key: Array | None,
    ) -> Scored:
        """Square root of the softplus of each logit."""
        del top_k
        logits = linear_logits(params, inputs, jitter=self.jitter, train=train, key=key)
        log_scores = 0.5 * log_softplus(logits)
        return Scored(
            logits=logits,
            log_scores=log_scores,
            probs=jax.nn.softmax(log_scores, axis=-1),
            preference=logits if self.groups is None else jnp.exp(log_scores),
        )


def log_softplus(z: Float[Array, "*d"]) -> Float[Array, "*d"]:
    """log(log(1 + exp(z))), finite in value and slope wherever z is."""
    # Below -14 it is z to the last bit of f32, and exp(z) would underflow.
    is_low = z < -14.0
    return jnp.where(is_low, z, jnp.log(jax.nn.softplus(jnp.where(is_low, 0.0, z))))
