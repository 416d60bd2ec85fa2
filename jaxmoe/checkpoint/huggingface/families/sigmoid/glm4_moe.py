# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 to GLM-4.7: the experts of DeepSeek-V3, RoPE on half of each head (arXiv 2508.06471).

QK-norm over each head and biases of q, k and v are fields; the first layers are dense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    options_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    BIAS,
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    QKV_BIAS,
    ROOT,
    SHARED,
)
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeFamily(Family):
    """GLM-4.5."""

    name: ClassVar[str] = "glm4_moe"
    architecture: ClassVar[str] = "Glm4MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", None)
    rules = (*ROOT, *ATTENTION, *QKV_BIAS, *QK_NORM, *DENSE, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        for name in ("num_nextn_predict_layers", "num_mtp_layers"):
            fields.get(name)  # of layers that are left out
        attention = parts.grouped_attention(
            fields,
            qk_norm="head" if fields.get("use_qk_norm", default=False) else "none",
            rotary_share=0.5,
            options=AttentionOptions(has_bias=fields.get("attention_bias", default=False)),
        )
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            attention,
            dense=parts.first_layers(fields),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        options = options_of(model)
        head_dim = model.attention.head_dim
        return (
            shared_fields(model)
            | grouped_expert_fields(model)
            | {
                "head_dim": head_dim,
                "partial_rotary_factor": options.rope_dim(head_dim) / head_dim,
                "attention_bias": options.has_bias,
                "use_qk_norm": getattr(model.attention, "qk_norm", "none") == "head",
                "num_nextn_predict_layers": 0,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
