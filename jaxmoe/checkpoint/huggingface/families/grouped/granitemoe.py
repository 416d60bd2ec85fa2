# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Granite 3: softmax over the chosen experts; multipliers of embedding, residual, logits.

The attention logits have a multiplier, too. On disk the experts of a layer are two tensors,
input_linear and output_linear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    balance_of,
    moe_of,
    multiplier_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, LINEAR_EXPERTS, ROOT
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraniteMoeFamily(Family):
    """Granite 3 with experts."""

    name: ClassVar[str] = "granitemoe"
    architecture: ClassVar[str] = "GraniteMoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *LINEAR_EXPERTS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        method = METHODS["mixtral"]
        width = fields.size("intermediate_size")
        return parts.assemble(
            fields,
            parts.experts(fields, width, method.router, method.gate),
            parts.grouped_attention(fields, qk_norm="none"),
            multipliers=parts.multipliers(fields),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | multiplier_fields(model)
            | {
                "head_dim": model.attention.head_dim,
                "intermediate_size": moe.expert_dim,
                "num_local_experts": moe.num_experts,
                "router_aux_loss_coef": balance_of(model),
            }
        )
