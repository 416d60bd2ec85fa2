# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice by softmax: each token takes the K experts of highest logit.

    z = x W                                        [T E], f32
    before:  score_ti = softmax_E(z_t)_i           over all experts (Switch, OLMoE, Qwen3-MoE)
    after:   score_ti = softmax_K(z_t)_i           over the chosen K (Mixtral, ArchScale)

The chosen experts are the same; ties go to the lower expert id. Renormalising `before` over the K
is `after` exactly, and is the business of the gate. With K = 1 `after` is the constant 1 and the
language-model loss gives the router no gradient. A selection bias is added to softmax_E(z), and a
group's score is a sum of it; where there is neither, logits are compared, which order the same.

Sources: Switch Transformers (arXiv 2101.03961, section 2.1), Mixtral (arXiv 2401.04088, section
2.1).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

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
class SoftmaxTopKConfig:
    """The K experts of highest softmax probability."""

    name: ClassVar[str] = "softmax_topk"

    softmax: Literal["before", "after"] = "before"
    """Softmax over all experts before the choice, or over the chosen ones after it."""
    bias: BiasConfig | None = None
    """Added to the probabilities for the choice alone."""
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
        """Softmax over all experts; over the chosen ones once they are."""
        del top_k
        logits = linear_logits(params, inputs, jitter=self.jitter, train=train, key=key)
        probs = jax.nn.softmax(logits, axis=-1)
        return Scored(
            logits=logits,
            log_scores=jax.nn.log_softmax(logits, axis=-1),
            probs=probs,
            preference=logits if self.groups is None else probs,
            is_over_chosen=self.softmax == "after",
        )
