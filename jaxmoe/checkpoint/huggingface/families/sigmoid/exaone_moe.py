# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""K-EXAONE: windows with RoPE and full attention without positions, the experts of DeepSeek-V3.

Layers for multi-token prediction (`mtp`) are left out (technical report arXiv 2601.01739).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    feed_forward_types_of,
    grouped_expert_fields,
    layer_types_of,
    moe_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
    SHARED,
    rule,
)
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig

_BIAS = "mlp.e_score_correction_bias"
_WINDOW = 4096
"""Window where the config has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExaoneMoeFamily(Family):
    """K-EXAONE."""

    name: ClassVar[str] = "exaone_moe"
    architecture: ClassVar[str] = "ExaoneMoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    rules = (
        *ROOT,
        *ATTENTION,
        *QK_NORM,
        *DENSE,
        *PROJECTED_EXPERTS,
        *SHARED,
        rule(f"{ROUTER_STATE}/bias", _BIAS, "mlp.gate.e_score_correction_bias"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        for name in ("num_nextn_predict_layers", "is_moe_layer", "first_last_k_dense_replace"):
            fields.get(name)  # of layers that are left out, or what mlp_layer_types says
        attention = parts.grouped_attention(fields, qk_norm="head")
        if config.get("sliding_window", _WINDOW) is None:
            raise CheckpointError("config.sliding_window=null is not supported, only an integer")
        default = parts.every_so_many(fields, "sliding_window_pattern", 4)
        mixers = parts.windows_with_positions(fields, attention, default, _WINDOW)
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            mixers[0],
            dense=parts.layers_named_dense(fields, 1),
            layers=parts.layers_of(mixers, mixers[0]),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | grouped_expert_fields(model)
            | layer_types_of(model)
            | feed_forward_types_of(model)
            | {
                "head_dim": model.attention.head_dim,
                "num_experts": moe.num_experts,
                "num_shared_experts": moe.num_shared_experts,
                "num_nextn_predict_layers": 0,
                "sliding_window": layer_types_of(model)["sliding_window"] or _WINDOW,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefix of the layers for multi-token prediction."""
        del config
        return ("mtp.",)
