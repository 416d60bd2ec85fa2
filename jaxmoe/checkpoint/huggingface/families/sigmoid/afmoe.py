# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""AFMoE (Trinity): norms before and after halves, a gate for each feature of a head.

Layers with a window have RoPE, the others no positions. Experts are scored by sigmoid and chosen
with a bias; with `mup_enabled` embeddings are multiplied by sqrt(D).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    bias_fields,
    layer_types_of,
    moe_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION_BIASES,
    DENSE,
    PROJECTIONS,
    QK_NORM,
    ROOT,
    SHARED,
    experts,
    norms,
    norms_after,
    rule,
)
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE
from jaxmoe.models.config import ForwardMultipliers, ModelConfig, ModelOptions
from jaxmoe.routing import LossFreeConfig, RenormalizedGateConfig, SigmoidTopKConfig

_WINDOW = 1024
"""Window where the config has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AfmoeFamily(Family):
    """AFMoE (Trinity)."""

    name: ClassVar[str] = "afmoe"
    architecture: ClassVar[str] = "AfmoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    rules = (
        *ROOT,
        *norms(("attention",), "pre_mlp_layernorm"),
        *norms_after("post_attention_layernorm", "post_mlp_layernorm"),
        *PROJECTIONS,
        *ATTENTION_BIASES,
        *QK_NORM,
        rule("attention/gate", "self_attn.gate_proj.weight"),
        *DENSE,
        *experts("mlp", ("gate_proj", "up_proj", "down_proj"), router="router.gate"),
        *SHARED,
        rule(f"{ROUTER_STATE}/bias", "mlp.expert_bias"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        for name, value in (("score_func", "sigmoid"), ("route_norm", True)):
            fields.only(name, value, "transformers computes these gates alone")
        for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
            fields.only(name, 1, "transformers has no groups of these experts")
        fields.get("load_balance_coeff")  # of training alone
        fields.there("head_dim")
        options = dataclasses.replace(parts.biased_options(fields), gate_form="element")
        gated = parts.grouped_attention(fields, qk_norm="head", options=options, is_gated=True)
        default = parts.every_so_many(fields, "global_attn_every_n_layers", 4)
        mixers = parts.windows_with_positions(fields, gated, default, _WINDOW)
        moe = parts.experts(
            fields,
            fields.size("moe_intermediate_size"),
            SigmoidTopKConfig(bias=LossFreeConfig()),
            RenormalizedGateConfig(scale=float(fields.get("route_scale", default=1.0))),
            num_shared_experts=fields.get("num_shared_experts", default=2),
        )
        first = fields.get("num_dense_layers", default=1)
        has_factor = fields.get("mup_enabled", default=False)
        factor = math.sqrt(fields.size("hidden_size")) if has_factor else 1.0
        model = parts.assemble(
            fields,
            moe,
            mixers[0],
            dense=tuple(range(min(first, fields.size("num_hidden_layers")))),
            layers=parts.layers_of(mixers, mixers[0]),
            multipliers=ForwardMultipliers(embedding=factor) if has_factor else None,
            has_balance=False,
        )
        return dataclasses.replace(model, options=ModelOptions(norm_place="both"))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        layers = layer_types_of(model)
        return (
            shared_fields(model)
            | bias_fields(model)
            | layers
            | {
                "head_dim": model.attention.head_dim,
                "sliding_window": layers["sliding_window"] or _WINDOW,
                "intermediate_size": model.dense_dim,
                "moe_intermediate_size": moe.expert_dim,
                "num_experts": moe.num_experts,
                "num_shared_experts": moe.num_shared_experts,
                "num_dense_layers": len(model.dense_layers) if model.moe else model.num_layers,
                "route_scale": getattr(moe.gate, "scale", 1.0),
                "mup_enabled": model.forward_multipliers.embedding != 1.0,
            }
        )
