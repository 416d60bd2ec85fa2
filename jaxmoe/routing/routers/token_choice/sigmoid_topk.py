# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice by sigmoid: each expert's score is its own, and they do not compete.

    z = x W,   score_ti = sigmoid(z_ti),   p_ti = score_ti / sum_j score_tj

The K experts of highest score + bias are chosen. The gate `renormalized` with a scale is
DeepSeek-V3's, `softmax` takes the bare score (Llama 4). Balance losses see p. Without a bias and
without groups the logits are compared, which order as the scores and do not saturate; a group's
score is a sum of sigmoids.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
from jaxtyping import Array

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
class SigmoidTopKConfig:
    """The K experts of highest sigmoid score."""

    name: ClassVar[str] = "sigmoid_topk"

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
        """Sigmoid of each logit."""
        del top_k
        logits = linear_logits(params, inputs, jitter=self.jitter, train=train, key=key)
        log_scores = jax.nn.log_sigmoid(logits)
        return Scored(
            logits=logits,
            log_scores=log_scores,
            probs=jax.nn.softmax(log_scores, axis=-1),
            preference=logits if self.groups is None else jax.nn.sigmoid(logits),
        )
