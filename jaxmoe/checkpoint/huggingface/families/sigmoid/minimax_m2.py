# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MiniMax-M2: sigmoid scores with a bias for the choice, QK-norm over all heads, partial RoPE.

On disk the experts are block_sparse_moe, w1, w3 and w2. The width that RoPE turns is `rotary_dim`
in published configs. The load-balancing loss of transformers counts the experts that would be
chosen by softmax without the bias; here the bias keeps the load even.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, options_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, QK_NORM, ROOT, experts, rule
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import LossFreeConfig, RenormalizedGateConfig, SigmoidTopKConfig

_BIAS = rule(
    f"{ROUTER_STATE}/bias",
    "block_sparse_moe.e_score_correction_bias",
    "mlp.e_score_correction_bias",
)
_WITHOUT_MEANING = (
    "attn_type_list",
    "max_model_len",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "qk_norm_type",
    "shared_moe_mode",
    "use_mtp",
    "use_routing_bias",
)
"""Fields of published configs that transformers does not read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MiniMaxM2Family(Family):
    """MiniMax-M2."""

    name: ClassVar[str] = "minimax_m2"
    architecture: ClassVar[str] = "MiniMaxM2ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "full")
    rules = (*ROOT, *ATTENTION, *QK_NORM, *experts("block_sparse_moe", ("w1", "w3", "w2")), _BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        for name in _WITHOUT_MEANING:
            fields.get(name)
        fields.only("scoring_func", "sigmoid", "these experts are scored by sigmoid")
        fields.only("shared_intermediate_size", 0, "MiniMax-M2 has no shared experts")
        fields.only("use_qk_norm", True, "queries and keys of MiniMax-M2 are normed")
        fields.only("sliding_window", None, "MiniMax-M2 attends to all earlier tokens")
        router = SigmoidTopKConfig(bias=LossFreeConfig())
        width = fields.size("intermediate_size")
        moe = parts.experts(fields, width, router, RenormalizedGateConfig())
        share = fields.get("rotary_dim", default=0) / fields.get("head_dim", default=128)
        attention = parts.grouped_attention(
            fields,
            qk_norm="full",
            rope_theta=5e6,
            rotary_share=share or 1.0,
            default_head_dim=128,
        )
        return parts.assemble(fields, moe, attention, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        head_dim = model.attention.head_dim
        return shared_fields(model) | {
            "head_dim": head_dim,
            "rotary_dim": options_of(model).rope_dim(head_dim),
            "intermediate_size": moe.expert_dim,
            "num_local_experts": moe.num_experts,
            "router_jitter_noise": 0.0,
        }
