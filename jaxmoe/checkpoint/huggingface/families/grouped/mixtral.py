# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Mixtral: softmax over the chosen experts, no QK-norm (arXiv 2401.04088).

On disk the experts are block_sparse_moe, w1, w3 and w2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields, window_of
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, ROOT, experts
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixtralFamily(Family):
    """Mixtral."""

    name: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *experts("block_sparse_moe", ("w1", "w3", "w2")))

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        method = METHODS["mixtral"]
        moe = parts.experts(fields, fields.size("intermediate_size"), method.router, method.gate)
        window = fields.get("sliding_window")
        return parts.assemble(
            fields,
            moe,
            parts.grouped_attention(fields, qk_norm="none", rope_theta=1e6, window=window),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "intermediate_size": moe.expert_dim,
            "num_local_experts": moe.num_experts,
            "router_aux_loss_coef": balance_of(model),
            "router_jitter_noise": 0.0,
            "sliding_window": window_of(model),
        }
