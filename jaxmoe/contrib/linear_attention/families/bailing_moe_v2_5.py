# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ling 2.5 and Ring 2.5: lightning attention with positions, and latent attention in some layers.

Every layer_group_size-th layer has latent attention, and those of a last group that is not whole.
The files have the model_type of Ling 3.0 and another architecture; transformers has no class of
them. Layers for multi-token prediction are left out.
Source: the published `BailingMoeV2_5ForCausalLM`.

Longer than 120 lines: lightning attention of MiniMax-01 has no positions and one norm, and which
layers it is in follows from a period alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import latent_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.families.sigmoid.bailing_moe import (
    FRAME,
    expert_fields,
    read_experts,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import LATENT_ATTENTION, rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.linear_attention.families.bailing_hybrid import in_ling, rotary_fields
from jaxmoe.contrib.linear_attention.rotary_lightning import RotaryLightningConfig
from jaxmoe.models.config import ModelConfig

_DEFAULTS: Final = {
    "head_dim": 128,
    "rope_theta": 6e5,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
}
"""Values of absent fields in the published class."""
_QKV = tuple(f"rotary_lightning/{name}" for name in "qkv")
_TENSORS: Final = {
    "q_norm": "query_layernorm.weight",
    "k_norm": "key_layernorm.weight",
    "z": "g_proj.weight",
    "o": "dense.weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BailingMoeV25Family(Family):
    """Ling 2.5."""

    name: ClassVar[str] = "bailing_moe_v2_5"
    architecture: ClassVar[str] = "BailingMoeV2_5ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    recurrent: ClassVar[str | None] = "rotary_lightning"
    rules = (
        *FRAME,
        *map(in_ling, LATENT_ATTENTION),
        rule("rotary_lightning_norm/gain", "input_layernorm.weight"),
        *(rule(path, "attention.query_key_value.weight", fused=_QKV) for path in _QKV),
        *(rule(f"rotary_lightning/{ours}", f"attention.{name}") for ours, name in _TENSORS.items()),
        rule("rotary_lightning/norm", "attention.g_norm.weight", layout="flat"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(_DEFAULTS | {"num_key_value_heads": None} | rotary_fields(config))
        for name in ("use_qkv_bias", "use_bias", "linear_silu"):
            fields.only(name, False, "the published class computes none")
        count = fields.size("num_hidden_layers")
        period = fields.get("layer_group_size", default=5)
        heads = fields.size("num_attention_heads")
        attention = parts.latent_attention(fields)
        if attention.yarn is not None:
            raise CheckpointError(
                "config.rope_scaling is not supported, only null: lightning"
                " attention here has no scaling of RoPE"
            )
        width = fields.size("head_dim")
        lightning = RotaryLightningConfig(
            num_heads=heads,
            head_dim=width,
            decay_layers=count,
            norm_epsilon=float(fields.there("rms_norm_eps")),
            qk_norm=fields.get("use_qk_norm", default=True),
            rotary_dim=attention.rope_dim,
            rope_theta=attention.rope_theta,
            norm_groups=fields.get("group_norm_size", default=4),
        )
        end = count // period * period
        mixers = [
            attention if (layer + 1) % period == 0 or layer >= end else lightning
            for layer in range(count)
        ]
        mixers = RotaryLightningConfig.number_layers(mixers)
        layers = parts.layers_of(mixers, attention)
        return parts.assemble(fields, attention=attention, layers=layers, **read_experts(fields))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, RotaryLightningConfig(head_dim=128))
        kinds = [kind.mixer.is_recurrent for kind in model.kinds]
        latent = latent_fields(model, "Ling 2.5")
        return (
            expert_fields(model)
            | latent
            | {
                "model_type": "bailing_hybrid",
                "head_dim": mixer.head_dim,
                "partial_rotary_factor": mixer.rotary_dim / mixer.head_dim,
                "layer_group_size": kinds.index(False) + 1 if False in kinds else len(kinds) + 1,
                "group_norm_size": mixer.norm_groups,
                "use_qk_norm": mixer.qk_norm,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)
