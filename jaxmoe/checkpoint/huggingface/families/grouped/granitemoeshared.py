# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Granite 3 with experts beside a SwiGLU of any width, which every token has.

Softmax over the chosen experts; multipliers of embedding, residual, attention and logits.
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
    multiplier_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    ATTENTION_BIASES,
    LINEAR_EXPERTS,
    ROOT,
    linear_swiglu,
)
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraniteMoeSharedFamily(Family):
    """Granite 3 with experts and a shared one."""

    name: ClassVar[str] = "granitemoeshared"
    architecture: ClassVar[str] = "GraniteMoeSharedForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        *ROOT,
        *ATTENTION,
        *ATTENTION_BIASES,
        *LINEAR_EXPERTS,
        *linear_swiglu("moe/shared", "shared_mlp"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        method = METHODS["mixtral"]
        moe = parts.experts(fields, fields.size("intermediate_size"), method.router, method.gate)
        if shared := fields.get("shared_intermediate_size", default=0):
            options = MoEOptions(shared_dim=shared)
            moe = dataclasses.replace(moe, num_shared_experts=1, options=options)
        return parts.assemble(
            fields,
            moe,
            parts.grouped_attention(fields, qk_norm="none", options=parts.biased_options(fields)),
            multipliers=parts.multipliers(fields),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | multiplier_fields(model)
            | bias_fields(model)
            | {
                "head_dim": model.attention.head_dim,
                "intermediate_size": moe.expert_dim,
                "num_local_experts": moe.num_experts,
                "shared_intermediate_size": moe.num_shared_units,
                "router_aux_loss_coef": balance_of(model),
            }
        )
