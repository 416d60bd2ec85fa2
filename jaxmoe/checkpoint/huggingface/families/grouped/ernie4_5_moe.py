# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""ERNIE 4.5: softmax over all experts, a bias for the choice alone, interleaved RoPE.

Experts are in every `moe_layer_interval`-th layer from `moe_layer_start_index` to
`moe_layer_end_index`. The load-balancing loss of transformers counts the experts that would be
chosen without the bias; here the bias keeps the load even.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    DENSE,
    PROJECTED_EXPERTS,
    ROOT,
    SHARED,
    rule,
)
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.routing import LossFreeConfig, RenormalizedGateConfig, SoftmaxTopKConfig

_BIAS = rule(
    f"{ROUTER_STATE}/bias",
    "mlp.moe_statics.e_score_correction_bias",
    "mlp.gate.moe_statics.e_score_correction_bias",
    layout="row",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ernie45MoeFamily(Family):
    """ERNIE 4.5."""

    name: ClassVar[str] = "ernie4_5_moe"
    architecture: ClassVar[str] = "Ernie4_5_MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *DENSE, *PROJECTED_EXPERTS, *SHARED, _BIAS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.only("use_bias", False, "feed-forwards and the head here have no biases")
        fields.only("moe_norm_min", 1e-12, "gates here are divided by any sum")
        fields.get("num_nextn_predict_layers")  # of layers that are left out
        moe = MoEConfig(
            num_experts=fields.size("moe_num_experts", "num_experts"),
            top_k=fields.size("moe_k", "num_experts_per_tok"),
            expert_dim=fields.size("moe_intermediate_size"),
            num_shared_experts=fields.get("moe_num_shared_experts", default=2),
            router=SoftmaxTopKConfig(bias=LossFreeConfig()),
            gate=RenormalizedGateConfig(),
            balancers=(),
        )
        attention = parts.grouped_attention(
            fields,
            qk_norm="none",
            rope_theta=500_000.0,
            options=AttentionOptions(rope_layout="interleaved"),
        )
        dense = _dense_layers(fields)
        return parts.assemble(fields, moe, attention, dense=dense, has_balance=False, is_tied=True)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        count = model.num_layers
        routed = [i for i, kind in enumerate(model.kinds) if kind.feed_forward.is_routed]
        start, end = (routed[0], routed[-1]) if routed else (count, count - 1)
        steps = [
            step
            for step in range(1, count + 1)
            if routed == [i for i in range(start, end + 1) if (i + 1) % step == 0]
        ]
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "use_bias": False,
            "intermediate_size": model.dense_dim,
            "moe_intermediate_size": moe.expert_dim,
            "moe_num_experts": moe.num_experts,
            "moe_num_shared_experts": moe.num_shared_experts,
            "moe_k": moe.top_k,
            "moe_layer_start_index": start,
            "moe_layer_end_index": end,
            "moe_layer_interval": steps[0] if steps else 1,
            "moe_norm_min": 1e-12,
        }

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the parts for multi-token prediction."""
        del config
        return ("model.mtp_",)


def _dense_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers without experts."""
    count = fields.size("num_hidden_layers")
    step = fields.get("moe_layer_interval", default=1)
    start = fields.get("moe_layer_start_index", default=1)
    end = fields.get("moe_layer_end_index", default=-1)
    end = count - 1 if end == -1 else end
    return tuple(i for i in range(count) if (i + 1) % step or not start <= i <= end)
