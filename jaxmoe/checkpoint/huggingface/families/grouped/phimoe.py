# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Phi-3.5-MoE: LayerNorm with biases, experts chosen as SparseMixer does (arXiv 2409.12136).

RoPE of type "longrope" multiplies cosines and sines by short_mscale in rows that take the short
divisors, by long_mscale in others. There transformers 5.23 keeps the short divisors, which the
published model does not. The head has a bias with lm_head_bias.

Longer than 120 lines: RoPE of other families has one factor for rows of any length, and the two of
this one are translated here.
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
    shared_fields,
    window_of,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, ATTENTION_BIASES, ROOT, experts, rule
from jaxmoe.checkpoint.huggingface.weights import Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.norms import LayerNormConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, ModelOptions
from jaxmoe.routing import SoftmaxGateConfig, SparseMixerConfig

_SCALES = ("short_mscale", "long_mscale")
_LONG = "long_attention_factor"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhimoeFamily(Family):
    """Phi-3.5-MoE."""

    name: ClassVar[str] = "phimoe"
    architecture: ClassVar[str] = "PhimoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        *ROOT,
        Rule(path="head/bias", keys=("lm_head.bias",)),
        Rule(path="final_norm/bias", keys=("model.norm.bias",)),
        *ATTENTION,
        rule("attention_norm/bias", "input_layernorm.bias"),
        rule("feed_forward_norm/bias", "post_attention_layernorm.bias"),
        *ATTENTION_BIASES,
        *experts(
            "block_sparse_moe", ("w1", "w3", "w2"), in_memory="mlp", router_in_memory="router"
        ),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(_with_factors(config))
        fields.only("num_experts_per_tok", 2, "SparseMixer of transformers chooses two experts")
        fields.only("input_jitter_noise", 0.0, "it is of training; set it to 0 for inference")
        margin = 2.0 * fields.get("router_jitter_noise", default=0.01)
        attention = parts.grouped_attention(
            fields,
            qk_norm="none",
            rope_theta=1e6,
            window=fields.get("sliding_window"),
            options=parts.biased_options(fields),
        )
        has_bias = fields.get("lm_head_bias", default=False)
        attention = _with_long_factor(attention, config)
        width = fields.size("intermediate_size")
        moe = parts.experts(fields, width, SparseMixerConfig(margin=margin), SoftmaxGateConfig())
        model = parts.assemble(fields, moe, attention)
        return dataclasses.replace(
            model,
            norm=LayerNormConfig(has_bias=True),
            options=ModelOptions(has_head_bias=True) if has_bias else None,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        fields = shared_fields(model)
        if (rope := fields.get("rope_scaling")) is not None:
            short = rope.get("attention_factor", 1.0)
            scales = {"short_mscale": short, "long_mscale": rope.get(_LONG, short)}
            for name in ("rope_scaling", "rope_parameters"):
                plain = {key: value for key, value in fields[name].items() if key != _LONG}
                fields[name] = plain | scales
        return (
            fields
            | bias_fields(model)
            | {
                "head_dim": model.attention.head_dim,
                "intermediate_size": moe.expert_dim,
                "num_local_experts": moe.num_experts,
                "router_jitter_noise": getattr(moe.router, "margin", 0.0) / 2.0,
                "router_aux_loss_coef": balance_of(model),
                "sliding_window": window_of(model),
                "lm_head_bias": model.extras.has_head_bias,
            }
        )


def _with_factors(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with attention_factor in place of short_mscale, and without long_mscale.

    Raises:
        CheckpointError: RoPE is neither plain nor of type "longrope" with both.
    """
    renamed = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scales = [rope.get(scale) for scale in _SCALES]
        if kind != "default" and (kind != "longrope" or None in scales):
            raise CheckpointError(
                f"config.{name}={show_value(dict(rope))} is not supported: RoPE here is plain, or"
                " of type 'longrope' with short_mscale and long_mscale"
            )
        if kind == "longrope":
            plain = {key: value for key, value in rope.items() if key not in _SCALES}
            renamed[name] = plain | {"attention_factor": scales[0]}
    return renamed


def _with_long_factor(attention: AttentionConfig, config: Mapping[str, Any]) -> AttentionConfig:
    """Return the attention with the factor of long rows, where it is another."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    short, long = (rope.get(scale) for scale in _SCALES)
    scaling: Any = attention.extras.rope_scaling
    if scaling is None or long is None or long == short:
        return attention
    scaling = dataclasses.replace(scaling, long_attention_factor=float(long))
    options = dataclasses.replace(attention.extras, rope_scaling=scaling)
    return dataclasses.replace(attention, options=options)
