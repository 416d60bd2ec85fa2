# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""MiMo-V2-Flash: values narrower than keys, sinks and more heads in layers with a window.

Layers with a window have twice the heads of keys and values of the others, and rotary bases of
their own. Of the published names of fields those are read that transformers reads, and the
patterns and bases that it takes for granted.

Longer than 120 lines: attention of the core has values as wide as keys, and reads one RoPE for all
layers of a config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    feed_forward_types_of,
    grouped_expert_fields,
    layer_types_of,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.ropes import Rope, read_rope, rope_fields
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    BIAS,
    DENSE,
    PROJECTED_EXPERTS,
    QKV_BIAS,
    ROOT,
    rule,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.family_layers.narrow_values import NarrowValuesConfig
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig

_DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "attention_value_scale": 1.0,
    "rms_norm_eps": 1e-5,
}
"""Values of absent fields in transformers, and of the shared experts that there are not."""
_ROPES: Final = {parts.FULL: ("rope_theta", 5e6), parts.SLIDING: ("swa_rope_theta", 1e4)}
"""Published field and default of the rotary base of each kind of layer."""
_SHARE: Final = 0.334


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MimoV2FlashFamily(Family):
    """MiMo-V2-Flash."""

    name: ClassVar[str] = "mimo_v2_flash"
    architecture: ClassVar[str] = "MiMoV2FlashForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("narrow_values", "none")
    rules = (
        *ROOT,
        *ATTENTION,
        *QKV_BIAS,
        rule("attention/sinks", "self_attn.attention_sink_bias", "self_attn.sinks"),
        *DENSE,
        *PROJECTED_EXPERTS,
        BIAS,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        values = {name: value for name, value in config.items() if value is not None}
        values.setdefault(
            "attention_value_scale", 1.0 if "attention_value_scale" in config else 0.707
        )
        fields = Fields({**_DEFAULTS, **values})
        count = fields.size("num_hidden_layers")
        pattern = fields.get("hybrid_layer_pattern")
        default = [layer != 0 and (layer + 1) % 6 != 0 for layer in range(count)]
        kinds = parts.named_layers(
            fields,
            "layer_types",
            (parts.FULL, parts.SLIDING),
            [parts.SLIDING if windowed else parts.FULL for windowed in pattern or default],
        )
        mixers = {kind: _attention(fields, kind) for kind in _ROPES}
        first = mixers[kinds[0]]
        moe = dataclasses.replace(parts.sigmoid_experts(fields), num_shared_experts=0)
        return parts.assemble(
            fields,
            moe,
            first,
            dense=parts.layers_named_dense(fields, 1),
            layers=parts.layers_of([mixers[kind] for kind in kinds], first),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        attention: Any = model.attention
        fields = shared_fields(model) | grouped_expert_fields(model) | layer_types_of(model)
        for name in ("rope_theta", "partial_rotary_factor", "n_shared_experts"):
            fields.pop(name, None)
        ropes = {}
        mixers: Any = model.mixers
        for kind, has_window in zip(_ROPES, (False, True), strict=True):
            matching = (each for each in mixers if (each.window is not None) == has_window)
            mixer = next(matching, attention)
            share = mixer.extras.rope_dim(mixer.head_dim) / mixer.head_dim
            ropes[kind] = rope_fields(mixer.rope_theta, share, None)["rope_parameters"]
            ropes[kind]["partial_rotary_factor"] = share
        return (
            fields
            | feed_forward_types_of(model)
            | {
                "num_key_value_heads": attention.num_kv_heads // (2 if attention.window else 1),
                "head_dim": attention.head_dim,
                "v_head_dim": attention.value_dim,
                "attention_bias": attention.extras.has_bias,
                "attention_value_scale": getattr(attention, "value_scale", 1.0),
                "rope_parameters": ropes,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefix of the layers for multi-token prediction."""
        del config
        return ("model.mtp.",)


def _attention(fields: Fields, kind: str) -> NarrowValuesConfig:
    """Return the attention of a kind of layers."""
    is_windowed = kind == parts.SLIDING
    rope = _rope(fields, kind)
    size = fields.get("sliding_window_size")  # the tokens before the query
    window = fields.size("sliding_window")
    if size is not None:
        window = size + 1
    head_dim = fields.size("head_dim")
    return NarrowValuesConfig(
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads") * (2 if is_windowed else 1),
        head_dim=head_dim,
        value_dim=fields.size("v_head_dim"),
        value_scale=float(fields.get("attention_value_scale")),
        qk_norm="none",
        rope_theta=rope.theta,
        window=window if is_windowed else None,
        options=AttentionOptions(
            has_bias=fields.get("attention_bias", default=False),
            has_sinks=is_windowed,
            rotary_dim=rope.width(head_dim),
        ),
    )


def _rope(fields: Fields, kind: str) -> Rope:
    """Return RoPE of a kind of layers, for which transformers has parameters of its own."""
    name, theta = _ROPES[kind]
    theta = float(fields.get(name, default=theta))
    share = fields.get("partial_rotary_factor", default=_SHARE)
    parameters = fields.get("rope_parameters", default={}).get(kind) or {}
    rope = read_rope(Fields({"rope_parameters": parameters}), theta, share=share)
    if rope.scaling is not None:
        raise CheckpointError(
            f"config.rope_parameters.{kind}: RoPE of this family is of type 'default'"
        )
    return rope
