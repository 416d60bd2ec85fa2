# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token choice by softmax, sigmoid or sqrt(softplus) of x W: one scorer, three registered names.

    z = x W                                             [T E], f32; + b with logit_bias

    softmax_topk        score_ti = softmax_E(z_t)_i     over all experts, softmax="before"
                        score_ti = softmax_K(z_t)_i     over the chosen K, softmax="after"
    sigmoid_topk        score_ti = sigmoid(z_ti)
    sqrt_softplus_topk  score_ti = sqrt(log(1 + exp(z_ti)))

    p_t = score_t / sum_j score_tj                      read by balance losses

The K experts of highest score (plus bias, within the group limit) are chosen; ties go to the lower
expert id.

softmax: `before` (Switch, OLMoE, Qwen3-MoE) and `after` (Mixtral, ArchScale) choose the same
experts, and `before` with the gate `renormalized` equals `after`. With K = 1 `after` is the
constant 1, and the language-model loss gives the router no gradient. Sources: Switch Transformers
(arXiv 2101.03961, section 2.1), Mixtral (arXiv 2401.04088, section 2.1).

sigmoid: experts do not compete. The gate `renormalized` with a scale is DeepSeek-V3's, `softmax`
takes the bare score (Llama 4). Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).

sqrt_softplus: a score grows as sqrt(z), does not saturate and may exceed 1; its logarithm is z / 2
far below 0. Source: the score function `sqrtsoftplus` of Megatron-LM and of MaxText's DeepSeek-V4
configs.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from jaxmoe.configs import check_choices
from jaxmoe.declarations import Declaration
from jaxmoe.routing.base import Arrays, Key, RouterInputs, ScoreFunction, Traits
from jaxmoe.routing.biases.base import SelectionBias
from jaxmoe.routing.routers.linear import check_jitter, linear_declarations, linear_logits
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from jaxmoe.routing.routers.token_choice.token_choice import (
    Scored,
    TokenChoiceBase,
    score_logits,
    traits_of,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogitBiasConfig:
    """A trained bias of each expert, which acts on the choice and on the scores (gpt-oss)."""

    name: ClassVar[str] = "logit_bias"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TopKConfig(TokenChoiceBase):
    """Base class: the K experts of highest score."""

    bias: SelectionBias | None = None
    """Added to the scores for the choice alone."""
    groups: GroupLimitConfig | None = None
    """Limits a token's experts to few groups of neighbours."""
    jitter: float = 0.0
    """In training the input is multiplied by uniform numbers in 1 - jitter to 1 + jitter."""
    logit_bias: LogitBiasConfig | None = None
    """A trained bias of each expert, added to the logits; none when None."""

    def __post_init__(self):
        check_choices("router", self)
        check_jitter(self.jitter)

    @property
    def traits(self) -> Traits:
        """Causal; draws random numbers only for jitter."""
        return traits_of(self.bias, self.jitter)

    @property
    def is_over_chosen(self) -> bool:
        """Whether the scores are normalised over the chosen experts alone."""
        return False

    def declarations(self, *, num_experts: int, embed_dim: int) -> dict[str, Declaration]:
        """Return the matrix `weight [D E]`, and `bias [E]` with `logit_bias`."""
        return linear_declarations(
            num_experts=num_experts, embed_dim=embed_dim, has_bias=self.logit_bias is not None
        )

    def score(
        self, params: Arrays, inputs: RouterInputs, *, top_k: int, train: bool, key: Key
    ) -> Scored:
        """Score the logits by `score_function`."""
        del top_k
        logits = linear_logits(params, inputs, jitter=self.jitter, train=train, key=key)
        assert self.score_function is not None
        return score_logits(
            logits,
            self.score_function,
            groups=self.groups,
            is_over_chosen=self.is_over_chosen,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxTopKConfig(TopKConfig):
    """The K experts of highest softmax probability."""

    name: ClassVar[str] = "softmax_topk"
    score_function: ClassVar[ScoreFunction | None] = "softmax"

    softmax: Literal["before", "after"] = "before"
    """Softmax over all experts before the choice, or over the chosen ones after it."""

    @property
    def is_over_chosen(self) -> bool:
        """Whether the scores are normalised over the chosen experts alone."""
        return self.softmax == "after"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SigmoidTopKConfig(TopKConfig):
    """The K experts of highest sigmoid score."""

    name: ClassVar[str] = "sigmoid_topk"
    score_function: ClassVar[ScoreFunction | None] = "sigmoid"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SqrtSoftplusTopKConfig(TopKConfig):
    """The K experts of highest sqrt(softplus) score."""

    name: ClassVar[str] = "sqrt_softplus_topk"
    score_function: ClassVar[ScoreFunction | None] = "sqrt_softplus"
