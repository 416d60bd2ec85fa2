# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Solar Open: the experts of DeepSeek-V3 in every layer, no QK-norm, RoPE on whole heads."""

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
    PROJECTED_EXPERTS,
    QKV_BIAS,
    ROOT,
    SHARED,
)
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SolarOpenFamily(Family):
    """Solar Open."""

    name: ClassVar[str] = "solar_open"
    architecture: ClassVar[str] = "SolarOpenForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *QKV_BIAS, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.only("first_k_dense_replace", 0, "every layer of Solar Open has experts")
        fields.only("use_qk_norm", False, "queries and keys of Solar Open are not normed")
        fields.get("intermediate_size")  # of dense layers, which there are none of
        attention = parts.grouped_attention(
            fields,
            qk_norm="none",
            rope_theta=1e6,
            options=AttentionOptions(has_bias=fields.get("attention_bias", default=False)),
            default_head_dim=128,
        )
        moe = parts.sigmoid_experts(fields)
        return parts.assemble(fields, moe, attention, dense_dim=moe.expert_dim, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        experts = grouped_expert_fields(model)
        del experts["intermediate_size"], experts["first_k_dense_replace"]
        return (
            shared_fields(model)
            | experts
            | {
                "head_dim": model.attention.head_dim,
                "attention_bias": options_of(model).has_bias,
            }
        )
