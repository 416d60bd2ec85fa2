# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2: latent attention, softmax scores, groups ranked by their best (arXiv 2405.04434).

The gates are the scores times a scale. Features turn in neighbouring pairs. `topk_method` greedy
has no groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    latent_fields,
    moe_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    DENSE,
    LATENT_ATTENTION,
    PROJECTED_EXPERTS,
    ROOT,
    SHARED,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepseekV2Family(Family):
    """DeepSeek-V2."""

    name: ClassVar[str] = "deepseek_v2"
    architecture: ClassVar[str] = "DeepseekV2ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    rules = (*ROOT, *LATENT_ATTENTION, *DENSE, *PROJECTED_EXPERTS, *SHARED)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.only("rope_interleave", True, "DeepSeek-V2 turns neighbouring features")
        moe = parts.softmax_experts_in_groups(fields)
        attention = parts.latent_attention(fields)
        dense = parts.first_layers(fields)
        return parts.assemble(fields, moe, attention, dense=dense, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        has_groups = getattr(moe_of(model).router, "groups", None) is not None
        return (
            shared_fields(model)
            | latent_fields(model, "DeepSeek-V2")
            | grouped_expert_fields(model)
            | {
                "scoring_func": "softmax",
                "topk_method": "group_limited_greedy" if has_groups else "greedy",
                "moe_layer_freq": 1,
            }
        )
