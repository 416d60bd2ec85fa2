# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cohere 2 with experts: attention and feed-forward in parallel, behind one norm.

Layers with a window have RoPE, which turns neighbouring features; the others have no positions,
except dense layers if `prefix_dense_sliding_window_pattern` is 1. Shared experts are added; with
`shared_expert_combination_strategy` "average" there must be none.

Longer than 120 lines: no layer lacks an option; there are two kinds of scores and of norms, and
windows follow from two patterns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    bias_fields,
    feed_forward_types_of,
    layer_types_of,
    moe_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION_BIASES,
    DENSE,
    PROJECTED_EXPERTS,
    PROJECTIONS,
    ROOT,
    SHARED,
    rule,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.norms import LayerNormConfig, RmsNormConfig
from jaxmoe.layers.residual import ParallelResidualConfig
from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.routing import (
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
)

_WINDOW = 4096
"""Window where the config has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cohere2MoeFamily(Family):
    """Cohere 2 with experts."""

    name: ClassVar[str] = "cohere2_moe"
    architecture: ClassVar[str] = "Cohere2MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        *ROOT,
        rule("attention_norm/gain", "input_layernorm.weight"),
        *PROJECTIONS,
        *ATTENTION_BIASES,
        *DENSE,
        *PROJECTED_EXPERTS,
        *SHARED,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        is_rms = config.get("rms_norm_eps") is not None
        epsilon = config.get("layer_norm_eps") or 1e-5
        defaults = {} if is_rms else {"rms_norm_eps": epsilon}
        fields = Fields({"tie_word_embeddings": True} | dict(config) | defaults)
        fields.get("layer_norm_eps")
        fields.there("head_dim")
        dense = parts.layers_named_dense(fields, 0)
        options = dataclasses.replace(parts.biased_options(fields), rope_layout="interleaved")
        attention = parts.grouped_attention(fields, qk_norm="none", options=options)
        mixers = parts.windows_with_positions(fields, attention, _layer_types(fields), _WINDOW)
        if fields.get("prefix_dense_sliding_window_pattern", default=1) == 1:
            mixers = [
                dataclasses.replace(mixer, positions="rotary") if layer in dense else mixer
                for layer, mixer in enumerate(mixers)
            ]
        scale = float(fields.get("logit_scale", default=0.0625))
        model = parts.assemble(
            fields,
            _experts(fields),
            mixers[0],
            dense=dense,
            dense_dim=fields.get("prefix_dense_intermediate_size"),
            layers=parts.layers_of(mixers, mixers[0]),
            multipliers=ForwardMultipliers(logits=scale),
            has_balance=False,
        )
        norm = RmsNormConfig() if is_rms else LayerNormConfig()
        return dataclasses.replace(model, norm=norm, residual=ParallelResidualConfig())

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        scale = moe.extras.shared_scale
        layers = layer_types_of(model)
        has_positions = all(
            getattr(kind.mixer, "positions", None) == "rotary"
            for kind in model.kinds
            if not kind.feed_forward.is_routed
        )
        is_rms = model.norm.name == "rms"
        return (
            shared_fields(model)
            | bias_fields(model)
            | layers
            | feed_forward_types_of(model)
            | {
                "head_dim": model.attention.head_dim,
                "sliding_window": layers["sliding_window"] or _WINDOW,
                "rms_norm_eps": model.norm_epsilon if is_rms else None,
                "layer_norm_eps": model.norm_epsilon,
                "prefix_dense_sliding_window_pattern": 1 if has_positions else 2,
                "prefix_dense_intermediate_size": model.dense_dim,
                "intermediate_size": moe.expert_dim,
                "num_experts": moe.num_experts,
                "num_shared_experts": moe.num_shared_experts,
                "shared_expert_combination_strategy": "sum" if scale == 1.0 else "average",
                "expert_selection_fn": moe.router.score_function,
                "norm_topk_prob": moe.gate.name == "renormalized",
                "logit_scale": model.forward_multipliers.logits,
            }
        )


def _experts(fields: Fields) -> Any:
    """Return the experts: softmax over the chosen ones, or sigmoid."""
    scores = fields.get("expert_selection_fn", default="softmax")
    count = fields.get("num_shared_experts", default=0)
    strategy = fields.get("shared_expert_combination_strategy", default="average")
    if strategy not in ("sum", "average"):
        raise CheckpointError(
            f"config.shared_expert_combination_strategy={show_value(strategy)} is neither 'sum'"
            " nor 'average'"
        )
    scale = 0.5 if count and strategy == "average" else 1.0
    is_divided = fields.get("norm_topk_prob", default=True)
    if scores == "softmax":
        router = SoftmaxTopKConfig(softmax="after")
        gate = SoftmaxGateConfig(scale=scale)
    elif scores == "sigmoid":
        router = SigmoidTopKConfig()
        gate = (RenormalizedGateConfig if is_divided else SoftmaxGateConfig)(scale=scale)
    else:
        raise CheckpointError(
            f"config.expert_selection_fn={show_value(scores)} is neither 'softmax' nor 'sigmoid'"
        )
    width = fields.size("intermediate_size")
    moe = parts.experts(fields, width, router, gate, num_shared_experts=count)
    return moe if scale == 1.0 else dataclasses.replace(moe, options=MoEOptions(shared_scale=scale))


def _layer_types(fields: Fields) -> list[str]:
    """Return kinds of layers where `layer_types` is absent: those of dense layers come first."""
    first = fields.get("first_k_dense_replace", default=0)
    dense = parts.every_so_many(fields, "prefix_dense_sliding_window_pattern", 1)
    sparse = parts.every_so_many(fields, "sliding_window_pattern", 4)
    return [*dense[:first], *sparse][: fields.size("num_hidden_layers")]
