# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Phi-3.5-MoE: LayerNorm with biases, experts chosen as SparseMixer does (arXiv 2409.12136).

RoPE of type "longrope" multiplies cosines and sines by short_mscale and long_mscale, which must be
equal. A head with a bias (lm_head_bias) is not supported.
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
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import SoftmaxGateConfig, SparseMixerConfig

_SCALES = ("short_mscale", "long_mscale")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhimoeFamily(Family):
    """Phi-3.5-MoE."""

    name: ClassVar[str] = "phimoe"
    architecture: ClassVar[str] = "PhimoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        *ROOT,
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
        fields = Fields(_with_one_scale(config))
        fields.only("num_experts_per_tok", 2, "SparseMixer of transformers chooses two experts")
        fields.only("lm_head_bias", False, "the head here has no bias")
        fields.only("input_jitter_noise", 0.0, "it is of training; set it to 0 for inference")
        margin = 2.0 * fields.get("router_jitter_noise", default=0.01)
        attention = parts.grouped_attention(
            fields,
            qk_norm="none",
            rope_theta=1e6,
            window=fields.get("sliding_window"),
            options=parts.biased_options(fields),
        )
        width = fields.size("intermediate_size")
        moe = parts.experts(fields, width, SparseMixerConfig(margin=margin), SoftmaxGateConfig())
        model = parts.assemble(fields, moe, attention)
        return dataclasses.replace(model, norm=LayerNormConfig(has_bias=True))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        fields = shared_fields(model)
        if (rope := fields.get("rope_scaling")) is not None:
            scale = rope.get("attention_factor", 1.0)
            for name in ("rope_scaling", "rope_parameters"):
                fields[name] = fields[name] | dict.fromkeys(_SCALES, scale)
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
                "lm_head_bias": False,
            }
        )


def _with_one_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with attention_factor in place of two equal factors.

    Raises:
        CheckpointError: They differ, or RoPE is neither plain nor of type "longrope".
    """
    usual = dict(config)
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        scales = {rope.get(scale) for scale in _SCALES}
        if kind != "default" and (kind != "longrope" or len(scales) > 1 or None in scales):
            raise CheckpointError(
                f"config.{name}={show_value(dict(rope))} is not supported: RoPE here is plain, or"
                " of type 'longrope' with short_mscale equal to long_mscale"
            )
        if kind == "longrope":
            plain = {key: value for key, value in rope.items() if key not in _SCALES}
            usual[name] = plain | {"attention_factor": scales.pop()}
    return usual
