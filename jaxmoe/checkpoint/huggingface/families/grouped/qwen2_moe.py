# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen2-MoE and Qwen1.5-MoE: a shared expert with a gate of its own, biases of q, k and v.

The shared expert has a width of its own and is multiplied by the sigmoid of one product of each
token (arXiv 2407.10671, section 2.2.2). With `use_sliding_window` every second one of the first
`max_window_layers` layers has a window, or those that `layer_types` names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    balance_of,
    layer_types_of,
    moe_of,
    options_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    DENSE,
    PROJECTED_EXPERTS,
    QKV_BIAS,
    ROOT,
    rule,
    swiglu,
)
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig

_SHARED = (
    *swiglu("moe/shared", "mlp.shared_expert"),
    rule("moe/shared_gate/weight", "mlp.shared_expert_gate.weight"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2MoeFamily(Family):
    """Qwen2-MoE."""

    name: ClassVar[str] = "qwen2_moe"
    architecture: ClassVar[str] = "Qwen2MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *QKV_BIAS, *DENSE, *PROJECTED_EXPERTS, *_SHARED)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        width = fields.size("shared_expert_intermediate_size")
        moe = dataclasses.replace(
            parts.token_choice(fields, expert_dim=fields.size("moe_intermediate_size")),
            num_shared_experts=1,
            options=MoEOptions(shared_dim=width, has_shared_gate=True),
        )
        has_bias = fields.get("qkv_bias", default=True)
        attention = parts.grouped_attention(
            fields, qk_norm="none", options=AttentionOptions(has_bias=has_bias)
        )
        first = fields.get("max_window_layers", default=28)
        is_narrow = fields.get("use_sliding_window", default=False)
        default = [
            parts.SLIDING if is_narrow and layer < first and layer % 2 == 0 else parts.FULL
            for layer in range(fields.size("num_hidden_layers"))
        ]
        mixers = parts.windowed_attention(fields, attention, default)
        return parts.assemble(
            fields,
            moe,
            mixers[0],
            dense=parts.sparse_steps(fields),
            layers=parts.layers_of(mixers, mixers[0]),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        dense = model.dense_layers if model.moe else range(model.num_layers)
        windows = layer_types_of(model)
        return (
            shared_fields(model)
            | windows
            | {
                "head_dim": model.attention.head_dim,
                "qkv_bias": options_of(model).has_bias,
                "intermediate_size": model.dense_dim,
                "moe_intermediate_size": moe.expert_dim,
                "shared_expert_intermediate_size": moe.num_shared_units,
                "num_experts": moe.num_experts,
                "norm_topk_prob": moe.gate.name == "renormalized",
                "router_aux_loss_coef": balance_of(model),
                "decoder_sparse_step": 1,
                "mlp_only_layers": list(dense),
                "use_sliding_window": windows["sliding_window"] is not None,
                "max_window_layers": model.num_layers,
            }
        )
