# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ling 2.0 and Ring 2.0: the experts of DeepSeek-V3, QK-norm, RoPE on half of each head.

transformers has no class of them: the published files bring their own, whose names of tensors these
are. One tensor has queries, keys and values. Layers for multi-token prediction are left out.
Source: arXiv 2510.22115, and the published `BailingMoeV2ForCausalLM`.

Longer than 120 lines: no layer lacks an option; half of it serves all families of Ling.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    options_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import DENSE, NORMS, PROJECTED_EXPERTS, ROOT, SHARED, rule
from jaxmoe.checkpoint.huggingface.weights import EMBEDDING, LING_EMBEDDING, ROUTER_STATE
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig

_ONLY: Final = {
    "score_function": ("sigmoid", "these experts are scored by sigmoid"),
    "moe_router_enable_expert_bias": (True, "these experts are chosen with a bias"),
    "embedding_dropout": (0.0, "there is no dropout here"),
    "output_dropout": (0.0, "there is no dropout here"),
    "use_rmsnorm": (True, "norms are RMSNorm"),
    "norm_head": (False, "rows of the head are not normed"),
}
_TRAINING: Final = ("router_dtype", "mtp_loss_scaling_factor", "num_nextn_predict_layers")
"""Fields of training, and of layers that are left out."""
FRAME: Final = (
    dataclasses.replace(ROOT[0], keys=(LING_EMBEDDING, EMBEDDING)),
    *ROOT[1:],
    *DENSE,
    *PROJECTED_EXPERTS,
    *SHARED,
    rule(f"{ROUTER_STATE}/bias", "mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias"),
)
"""Rules of all but the mixers and their norms."""


def read_experts(fields: Fields) -> dict[str, Any]:
    """Return the arguments of `parts.assemble` that all models of Ling share.

    Args:
        fields: Fields of a config.
    """
    for name, (supported, why) in _ONLY.items():
        fields.only(name, supported, why)
    for name in _TRAINING:
        fields.get(name)
    moe = parts.sigmoid_experts(fields)
    width = moe.expert_dim
    fields.only(
        "moe_shared_expert_intermediate_size", width, "shared experts are as wide as others"
    )
    return {"moe": moe, "dense": parts.first_layers(fields), "has_balance": False}


def expert_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that all models of Ling share.

    Args:
        model: Model in its normal form.
    """
    fields = shared_fields(model) | grouped_expert_fields(model)
    fields["num_experts"] = fields.pop("n_routed_experts")
    fields["num_shared_experts"] = fields.pop("n_shared_experts")
    return fields | {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "num_nextn_predict_layers": 0,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BailingMoeFamily(Family):
    """Ling 2.0."""

    name: ClassVar[str] = "bailing_moe"
    architecture: ClassVar[str] = "BailingMoeV2ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", None)
    rules = (
        *FRAME,
        *NORMS,
        *(
            rule(
                f"attention/{name}{bias}",
                f"attention.query_key_value.{tensor}",
                fused=tuple(f"attention/{part}{bias}" for part in "qkv"),
                layout=layout,
            )
            for bias, tensor, layout in (("", "weight", "out_in"), ("_bias", "bias", "flat"))
            for name in "qkv"
        ),
        rule("attention/q_norm", "attention.query_layernorm.weight"),
        rule("attention/k_norm", "attention.key_layernorm.weight"),
        rule("attention/o", "attention.dense.weight"),
        rule("attention/o_bias", "attention.dense.bias"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(
            {"head_dim": 128, "rope_theta": 6e5, "routed_scaling_factor": 1.0, **config}
        )
        attention = parts.grouped_attention(
            fields,
            qk_norm="head" if fields.get("use_qk_norm", default=True) else "none",
            rotary_share=1.0,
            options=AttentionOptions(
                has_bias=fields.get("use_qkv_bias", default=False),
                has_output_bias=fields.get("use_bias", default=False),
            ),
        )
        return parts.assemble(fields, attention=attention, **read_experts(fields))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        options = options_of(model)
        head_dim = model.attention.head_dim
        return expert_fields(model) | {
            "head_dim": head_dim,
            "partial_rotary_factor": options.rope_dim(head_dim) / head_dim,
            "use_qk_norm": getattr(model.attention, "qk_norm", "none") == "head",
            "use_qkv_bias": options.has_bias,
            "use_bias": options.has_output_bias,
        }

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
