# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Llama 4, its text model: sigmoid scores that multiply the inputs of experts; layers without RoPE.

Those raise their queries with the position (arXiv 2501.19399). Layers with RoPE attend within
chunks of `attention_chunk_size`, and norm queries and keys without gains (`use_qk_norm`). Of the
published models, which are of text and images, the text model is read.

Longer than 120 lines: layers have no option for a pattern of positions, chunks and norms, so that
all are listed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, options_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family, WholeModel
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, ATTENTION_BIASES, ROOT, rule, swiglu
from jaxmoe.layers.mixers.attention_parts import ChunksConfig, QueryTemperatureConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.routing import SigmoidTopKConfig, SoftmaxGateConfig

_CHUNKED = "chunked_attention"
_FEED_FORWARDS = (
    rule("moe/router/weight", "feed_forward.router.weight"),
    *(
        rule("moe/experts/gate_up", "feed_forward.experts.gate_up_proj", half=half, layout="in_out")
        for half in (0, 1)
    ),
    rule("moe/experts/down", "feed_forward.experts.down_proj", layout="in_out"),
    *swiglu("moe/shared", "feed_forward.shared_expert"),
    *swiglu("feed_forward", "feed_forward"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama4TextFamily(Family):
    """Llama 4, its text model."""

    name: ClassVar[str] = "llama4_text"
    architecture: ClassVar[str] = "Llama4ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", None)
    whole_model: ClassVar[WholeModel | None] = WholeModel(
        name="llama4",
        prefix="language_model.",
        replacement="",
        left_out=("vision_model.", "multi_modal_projector."),
    )
    rules = (*ROOT, *ATTENTION, *ATTENTION_BIASES, *_FEED_FORWARDS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        count = fields.size("num_hidden_layers")
        gate = SoftmaxGateConfig(scales_input=True)
        width = fields.size("intermediate_size")
        moe = parts.experts(fields, width, SigmoidTopKConfig(), gate, num_shared_experts=1)
        is_normed = fields.get("use_qk_norm", default=True)
        place = "after" if is_normed else "before"
        attention = parts.grouped_attention(
            fields,
            qk_norm="unit" if is_normed else "none",
            rope_theta=5e5,
            options=parts.biased_options(fields, rope_layout="interleaved", qk_norm_place=place),
            default_head_dim=128,
        )
        mixers = _mixers(fields, attention, count)
        step = fields.get("interleave_moe_layer_step", default=1)
        routed = fields.get("moe_layers", default=range(step - 1, count, step))
        return parts.assemble(
            fields,
            moe,
            mixers[0],
            dense=tuple(layer for layer in range(count) if layer not in routed),
            dense_dim=fields.get("intermediate_size_mlp", default=16384),
            layers=parts.layers_of(mixers, mixers[0]),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        mixers: list[Any] = [kind.mixer for kind in model.kinds]
        growths = [mixer.query_temperature for mixer in mixers if mixer.positions == "none"]
        growth = next(iter(growths), None) or QueryTemperatureConfig()
        chunks = [mixer.chunk for mixer in mixers]
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "attention_bias": options_of(model).has_bias,
            "intermediate_size": moe.expert_dim,
            "intermediate_size_mlp": model.dense_dim,
            "num_local_experts": moe.num_experts,
            "moe_layers": [i for i, kind in enumerate(model.kinds) if kind.feed_forward.is_routed],
            "no_rope_layers": [int(mixer.positions == "rotary") for mixer in mixers],
            "layer_types": [_CHUNKED if chunk else parts.FULL for chunk in chunks],
            "attention_chunk_size": next(filter(None, chunks), 8192),
            "use_qk_norm": any(mixer.qk_norm == "unit" for mixer in mixers),
            "attn_temperature_tuning": any(growths),
            "floor_scale": int(growth.floor_scale),
            "attn_scale": growth.attn_scale,
        }


def _mixers(fields: Fields, attention: AttentionConfig, count: int) -> list[AttentionConfig]:
    """Return the attention of each layer: with RoPE, or with growing queries and without norms."""
    interval = fields.get("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(count)]
    has_rope = (fields.get("no_rope_layers") or default)[:count]
    default_kinds = [_CHUNKED if has else parts.FULL for has in has_rope]
    kinds = parts.named_layers(fields, "layer_types", (parts.FULL, _CHUNKED), default_kinds)
    chunks = (None, ChunksConfig(size=fields.get("attention_chunk_size", default=8192)))
    growth = QueryTemperatureConfig(
        floor_scale=float(fields.get("floor_scale", default=8192)),
        attn_scale=float(fields.get("attn_scale", default=0.1)),
    )
    is_tuned = fields.get("attn_temperature_tuning", default=True)
    still = dataclasses.replace(
        attention,
        qk_norm="none",
        positions="none",
        query_temperature=growth if is_tuned else None,
    )
    return [
        dataclasses.replace(attention if has else still, chunks=chunks[kind == _CHUNKED])
        for has, kind in zip(has_rope, kinds, strict=True)
    ]
