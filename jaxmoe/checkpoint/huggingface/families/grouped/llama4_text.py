# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Llama 4, its text model: sigmoid scores that multiply the inputs of experts; layers without RoPE.

Those raise their queries with the position (arXiv 2501.19399). Not computed: attention in chunks
shorter than the longest row, and the QK-norm without gains of `use_qk_norm`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, options_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import ATTENTION, ATTENTION_BIASES, ROOT, rule, swiglu
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers.attention_parts import QueryTemperatureConfig
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
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (*ROOT, *ATTENTION, *ATTENTION_BIASES, *_FEED_FORWARDS)

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        count = fields.size("num_hidden_layers")
        if fields.get("use_qk_norm", default=True):
            raise CheckpointError(
                "config.use_qk_norm=True is not supported, only False: a QK-norm here has gains and"
                " is the same in all layers"
            )
        gate = SoftmaxGateConfig(scales_input=True)
        width = fields.size("intermediate_size")
        moe = parts.experts(fields, width, SigmoidTopKConfig(), gate, num_shared_experts=1)
        options = parts.biased_options(fields, rope_layout="interleaved")
        attention = parts.grouped_attention(
            fields, qk_norm="none", rope_theta=5e5, options=options, default_head_dim=128
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
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "attention_bias": options_of(model).has_bias,
            "intermediate_size": moe.expert_dim,
            "intermediate_size_mlp": model.dense_dim,
            "num_local_experts": moe.num_experts,
            "moe_layers": [i for i, kind in enumerate(model.kinds) if kind.feed_forward.is_routed],
            "no_rope_layers": [int(mixer.positions == "rotary") for mixer in mixers],
            "layer_types": [parts.FULL] * model.num_layers,
            "attention_chunk_size": 8192,
            "use_qk_norm": False,
            "attn_temperature_tuning": any(growths),
            "floor_scale": int(growth.floor_scale),
            "attn_scale": growth.attn_scale,
        }


def _mixers(fields: Fields, attention: AttentionConfig, count: int) -> list[AttentionConfig]:
    """Return the attention of each layer, with RoPE or with growing queries."""
    interval = fields.get("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(count)]
    has_rope = (fields.get("no_rope_layers") or default)[:count]
    default_kinds = [_CHUNKED if has else parts.FULL for has in has_rope]
    kinds = parts.named_layers(fields, "layer_types", (parts.FULL, _CHUNKED), default_kinds)
    chunk = fields.get("attention_chunk_size", default=8192)
    longest = fields.get("max_position_embeddings", default=131_072)
    if _CHUNKED in kinds and chunk < longest:
        raise CheckpointError(
            f"config.attention_chunk_size={chunk} is below max_position_embeddings={longest}:"
            " attention in chunks is not computed here"
        )
    growth = QueryTemperatureConfig(
        floor_scale=float(fields.get("floor_scale", default=8192)),
        attn_scale=float(fields.get("attn_scale", default=0.1)),
    )
    is_tuned = fields.get("attn_temperature_tuning", default=True)
    still = dataclasses.replace(
        attention, positions="none", query_temperature=growth if is_tuned else None
    )
    return [attention if has else still for has in has_rope]
