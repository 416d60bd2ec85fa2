# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LFM2-MoE: short convolutions and attention by layer_types, sigmoid experts (arXiv 2511.23404).

Convolutions have as many channels as the stream. Experts are chosen with a bias, or without one.
Gates are divided by their sum; transformers adds 1e-6 to it, which is below the rounding of float32
for a sum of about 1.

Longer than 120 lines: no layer lacks an option; all tensors and most fields have names of their
own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import experts, root, rule
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Rule
from jaxmoe.contrib.linear_attention.short_convolution import ShortConvolutionConfig
from jaxmoe.models.config import ModelConfig, MoEConfig
from jaxmoe.routing import (
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
)

_CONVOLUTION = "conv"
_ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
_QK_NORM = {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}


def _of_inputs(suffix: str, key: str) -> tuple[Rule, ...]:
    """Return the rules of what the three inputs of a convolution have in one tensor."""
    paths = tuple(f"short_convolution/{name}{suffix}" for name in "bcx")
    return tuple(rule(path, f"conv.in_proj.{key}", fused=paths) for path in paths)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lfm2MoeFamily(Family):
    """LFM2 with experts."""

    name: ClassVar[str] = "lfm2_moe"
    architecture: ClassVar[str] = "Lfm2MoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    recurrent: ClassVar[str | None] = "short_convolution"
    rules = (
        *root("embedding_norm"),
        rule("attention_norm/gain", "operator_norm.weight"),
        rule("short_convolution_norm/gain", "operator_norm.weight"),
        rule("feed_forward_norm/gain", "ffn_norm.weight"),
        *(
            rule(f"attention/{ours}", f"self_attn.{theirs}.weight")
            for ours, theirs in (_ATTENTION | _QK_NORM).items()
        ),
        *_of_inputs("", "weight"),
        *_of_inputs("_in_bias", "bias"),
        rule("short_convolution/taps", "conv.conv.weight", layout="depthwise"),
        rule("short_convolution/bias", "conv.conv.bias"),
        rule("short_convolution/o", "conv.out_proj.weight"),
        rule("short_convolution/o_bias", "conv.out_proj.bias"),
        rule("feed_forward/gate_up", "feed_forward.w1.weight", half=0),
        rule("feed_forward/gate_up", "feed_forward.w3.weight", half=1),
        rule("feed_forward/down", "feed_forward.w2.weight"),
        *experts("feed_forward", ("w1", "w3", "w2"), in_memory="feed_forward"),
        rule(f"{ROUTER_STATE}/bias", "feed_forward.expert_bias"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        is_tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
        epsilon = config.get("norm_eps", 1e-5)
        fields = Fields(
            {**config, "tie_word_embeddings": is_tied, "rms_norm_eps": epsilon},
        )
        for name in ("tie_embedding", "norm_eps"):
            fields.get(name)  # they are read under the usual names
        has_bias = fields.get("conv_bias", default=False)
        convolution = ShortConvolutionConfig(
            num_channels=fields.size("hidden_size"),
            conv_length=fields.get("conv_L_cache", default=3),
            has_conv_bias=has_bias,
            has_projection_bias=has_bias,
        )
        attention = parts.grouped_attention(fields, qk_norm="head", rope_theta=1_000_000.0)
        kinds = parts.named_layers(fields, "layer_types", (_CONVOLUTION, parts.FULL), ())
        mixers = [convolution if kind == _CONVOLUTION else attention for kind in kinds]
        num_dense = fields.get("num_dense_layers", default=2)
        return parts.assemble(
            fields,
            _experts(fields),
            attention,
            dense=tuple(range(min(num_dense, len(kinds)))),
            layers=parts.layers_of(mixers, attention),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        unused = ShortConvolutionConfig(num_channels=model.embed_dim)
        mixer = recurrent_mixer(model, unused)
        moe = moe_of(model)
        kinds = [kind.mixer.is_recurrent for kind in model.kinds]
        fields = shared_fields(model)
        return fields | {
            "norm_eps": fields.pop("rms_norm_eps"),
            "head_dim": model.attention.head_dim,
            "layer_types": [_CONVOLUTION if is_recurrent else parts.FULL for is_recurrent in kinds],
            "conv_L_cache": mixer.conv_length,
            "conv_bias": mixer.has_conv_bias,
            "intermediate_size": model.dense_dim,
            "moe_intermediate_size": moe.expert_dim,
            "num_experts": moe.num_experts,
            "num_dense_layers": len(model.dense_layers) if model.moe else model.num_layers,
            "use_expert_bias": getattr(moe.router, "bias", None) is not None,
            "norm_topk_prob": moe.gate.name == "renormalized",
            "routed_scaling_factor": getattr(moe.gate, "scale", 1.0),
        }


def _experts(fields: Fields) -> MoEConfig:
    """Return the experts: sigmoid scores, a bias for the choice, a scale."""
    has_bias = fields.get("use_expert_bias", default=True)
    is_renormalized = fields.get("norm_topk_prob", default=True)
    gate = RenormalizedGateConfig if is_renormalized else SoftmaxGateConfig
    return parts.experts(
        fields,
        fields.size("moe_intermediate_size"),
        SigmoidTopKConfig(bias=LossFreeConfig() if has_bias else None),
        gate(scale=float(fields.get("routed_scaling_factor", default=1.0))),
    )
