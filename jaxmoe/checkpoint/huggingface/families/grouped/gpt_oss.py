# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: sinks, biases everywhere, a clamped SwiGLU, softmax over the chosen experts.

Every second layer has a window, from the first on. The experts of a layer are two tensors, inputs
before outputs, gate and up in turn (arXiv 2508.10925).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

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
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, ATTENTION_BIASES, ROOT, rule
from jaxmoe.layers.feed_forwards.activations import ClampedSwiGLUConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import SoftmaxGateConfig, SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig

_EXPERTS = (
    rule("moe/router/weight", "mlp.router.weight"),
    rule("moe/router/bias", "mlp.router.bias"),
    *(
        rule(path, key, half=half, halves="alternating", layout=layout)
        for path, key, layout in (
            ("moe/experts/gate_up", "mlp.experts.gate_up_proj", "in_out"),
            ("moe/experts/gate_up_bias", "mlp.experts.gate_up_proj_bias", "out_in"),
        )
        for half in (0, 1)
    ),
    rule("moe/experts/down", "mlp.experts.down_proj", layout="in_out"),
    rule("moe/experts/down_bias", "mlp.experts.down_proj_bias", layout="in_out"),
)
_YARN: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE of a config that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GptOssFamily(Family):
    """gpt-oss."""

    name: ClassVar[str] = "gpt_oss"
    architecture: ClassVar[str] = "GptOssForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        *ROOT,
        *ATTENTION,
        *ATTENTION_BIASES,
        rule("attention/sinks", "self_attn.sinks"),
        *_EXPERTS,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        if not config.get("rope_parameters") and not config.get("rope_scaling"):
            config = {**config, "rope_parameters": _YARN}
        fields = Fields(config)
        for name in ("experts_per_token", "initial_context_length"):
            fields.get(name)  # the names of its authors; transformers reads its own alone
        router = SoftmaxTopKConfig(softmax="after", logit_bias=LogitBiasConfig())
        width = fields.size("intermediate_size")
        moe = dataclasses.replace(
            parts.experts(fields, width, router, SoftmaxGateConfig()),
            activation=ClampedSwiGLUConfig(
                limit=float(fields.get("swiglu_limit", default=7.0)),
                alpha=float(fields.get("swiglu_alpha", default=1.702)),
            ),
            options=MoEOptions(has_expert_bias=True),
        )
        attention = parts.grouped_attention(
            fields,
            qk_norm="none",
            rope_theta=150_000.0,
            options=parts.biased_options(fields, has_bias=True, has_sinks=True),
            default_head_dim=64,
        )
        count = fields.size("num_hidden_layers")
        default = [parts.FULL if layer % 2 else parts.SLIDING for layer in range(count)]
        mixers = parts.windowed_attention(fields, attention, default, default_window=128)
        layers = parts.layers_of(mixers, mixers[0])
        return parts.assemble(fields, moe, mixers[0], layers=layers)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | layer_types_of(model)
            | {
                "head_dim": model.attention.head_dim,
                "attention_bias": options_of(model).has_bias,
                "intermediate_size": moe.expert_dim,
                "num_local_experts": moe.num_experts,
                "router_aux_loss_coef": balance_of(model),
                "swiglu_limit": getattr(moe.activation, "limit", 7.0),
                "swiglu_alpha": getattr(moe.activation, "alpha", 1.702),
            }
        )
