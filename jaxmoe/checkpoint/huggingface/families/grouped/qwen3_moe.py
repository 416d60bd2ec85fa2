# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE: softmax over all experts, QK-norm over each head (arXiv 2505.09388).

Dense layers follow from mlp_only_layers and decoder_sparse_step. Biases of attention are a field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    balance_of,
    moe_of,
    options_of,
    shared_fields,
    window_of,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    ATTENTION_BIASES,
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
)
from jaxmoe.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeFamily(Family):
    """Qwen3-MoE."""

    name: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    rules = (*ROOT, *ATTENTION, *ATTENTION_BIASES, *QK_NORM, *DENSE, *PROJECTED_EXPERTS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        moe = parts.token_choice(fields, expert_dim=fields.size("moe_intermediate_size"))
        window = fields.get("sliding_window")  # ignored without use_sliding_window
        window = window if fields.get("use_sliding_window") else None
        options = parts.biased_options(fields)
        attention = parts.grouped_attention(fields, qk_norm="head", window=window, options=options)
        return parts.assemble(fields, moe, attention, dense=parts.sparse_steps(fields))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        window = window_of(model)
        dense = model.dense_layers if model.moe else range(model.num_layers)
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "attention_bias": options_of(model).has_bias,
            "intermediate_size": model.dense_dim,
            "moe_intermediate_size": moe.expert_dim,
            "num_experts": moe.num_experts,
            "num_local_experts": moe.num_experts,
            "norm_topk_prob": moe.gate.name == "renormalized",
            "router_aux_loss_coef": balance_of(model),
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(dense),
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0 if window is not None else model.num_layers,
        }
