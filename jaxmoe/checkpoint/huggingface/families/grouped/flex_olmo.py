# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""FlexOlmo: the experts of OLMoE, norms after halves and of queries and keys over all heads.

Source: arXiv 2507.07024.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    balance_of,
    bias_fields,
    moe_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION_BIASES,
    PROJECTED_EXPERTS,
    PROJECTIONS,
    QK_NORM,
    ROOT,
    norms_after,
)
from jaxmoe.models.config import ModelConfig, ModelOptions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FlexOlmoFamily(Family):
    """FlexOlmo."""

    name: ClassVar[str] = "flex_olmo"
    architecture: ClassVar[str] = "FlexOlmoForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "full")
    rules = (
        *ROOT,
        *norms_after("post_attention_layernorm", "post_feedforward_layernorm"),
        *PROJECTIONS,
        *ATTENTION_BIASES,
        *QK_NORM,
        *PROJECTED_EXPERTS,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        attention = parts.grouped_attention(
            fields,
            qk_norm="full",
            rope_theta=500_000.0,
            options=parts.biased_options(fields),
        )
        moe = parts.token_choice(fields, fields.size("intermediate_size"))
        model = parts.assemble(fields, moe, attention, balance=0.01)
        return dataclasses.replace(model, options=ModelOptions(norm_place="after"))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | bias_fields(model)
            | {
                "head_dim": model.attention.head_dim,
                "intermediate_size": moe.expert_dim,
                "num_experts": moe.num_experts,
                "norm_topk_prob": moe.gate.name == "renormalized",
                "router_aux_loss_coef": balance_of(model),
            }
        )
