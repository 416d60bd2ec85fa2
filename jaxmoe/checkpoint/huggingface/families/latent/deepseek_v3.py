# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: latent attention, sigmoid scores with a bias, groups of experts (arXiv 2412.19437).

The bias affects only the choice; it is router state, not a parameter. Groups are ranked by their
two best experts; the first layers are dense. The norms of the latents have an epsilon of 1e-6
whatever the config says. Layers for multi-token prediction, which follow the others, are left out
with a warning, as in transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    latent_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    BIAS,
    DENSE,
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    ROOT,
    SHARED,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV3Family(Family):
    """DeepSeek-V3."""

    name: ClassVar[str] = "deepseek_v3"
    architecture: ClassVar[str] = "DeepseekV3ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    rules = (*ROOT, *LATENT_ATTENTION, *DENSE, *PROJECTED_EXPERTS, *SHARED, BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.get("num_nextn_predict_layers", "num_mtp_layers")
        moe = parts.sigmoid_experts(fields)
        attention = parts.latent_attention(fields)
        dense = parts.first_layers(fields)
        return parts.assemble(fields, moe, attention, dense=dense, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        return (
            shared_fields(model)
            | latent_fields(model, "DeepSeek-V3")
            | grouped_expert_fields(model)
            | {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "moe_layer_freq": 1,
                "num_nextn_predict_layers": 0,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
