# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""OLMoE: softmax over all experts, QK-norm over all heads (arXiv 2409.02060).

Biases of attention and a bound of q, k and v are fields, which published models do not use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, options_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    ATTENTION_BIASES,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OlmoeFamily(Family):
    """OLMoE."""

    name: ClassVar[str] = "olmoe"
    architecture: ClassVar[str] = "OlmoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "full")
    rules = (*ROOT, *ATTENTION, *ATTENTION_BIASES, *QK_NORM, *PROJECTED_EXPERTS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        moe = parts.token_choice(fields, expert_dim=fields.size("intermediate_size"))
        fields.only("sliding_window", None, "OLMoE attends to all earlier tokens")
        clip = fields.get("clip_qkv")
        options = parts.biased_options(fields, qkv_clip=None if clip is None else float(clip))
        attention = parts.grouped_attention(fields, qk_norm="full", options=options)
        return parts.assemble(fields, moe, attention, balance=0.01)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        options = options_of(model)
        return shared_fields(model) | {
            "intermediate_size": moe.expert_dim,
            "num_experts": moe.num_experts,
            "norm_topk_prob": moe.gate.name == "renormalized",
            "router_aux_loss_coef": balance_of(model),
            "attention_bias": options.has_bias,
            "clip_qkv": options.qkv_clip,
        }
