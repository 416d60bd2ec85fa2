# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ling 3.0: Kimi Delta Attention with bounded decays, and gated latent attention.

The experts are those of DeepSeek-V3. Layers are named by layer_types, or every layer_group_size-th
has latent attention. Names of fields and tensors are those of the published files, or of
transformers in memory. Layers for multi-token prediction are left out.
Source: transformers' `BailingHybridForCausalLM`.

Longer than 120 lines: latent attention of the core has no gates of heads, and tensors have two sets
of names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import feed_forward_types_of, latent_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.families.sigmoid.bailing_moe import (
    FRAME,
    expert_fields,
    read_experts,
)
from jaxmoe.checkpoint.huggingface.family import FAMILIES, Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import LATENT_ATTENTION, rule
from jaxmoe.checkpoint.huggingface.weights import Rule
from jaxmoe.contrib.linear_attention.families.kimi_linear import USUAL_NAMES
from jaxmoe.contrib.linear_attention.gated_latent import GatedLatentConfig
from jaxmoe.contrib.linear_attention.kimi_delta import KimiDeltaConfig
from jaxmoe.models.config import ModelConfig

_LINEAR = "linear_attention"
_DEFAULTS: Final = {
    "head_dim": 128,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "rope_theta": 6e6,
}
"""Values of absent fields in transformers."""
_ONLY: Final = {
    "no_kda_lora": (True, "decays and gates are products of the input itself"),
    "use_kda_lora": (False, "decays and gates are products of the input itself"),
    "gated_attention_proj_granularity_type": ("head_wise", "gates are those of heads"),
    "linear_silu": (True, "queries, keys and values of delta layers pass through a SiLU"),
    "tie_word_embeddings": (False, "transformers ties none in this family"),
    "use_qk_norm": (True, "queries and keys of delta layers have norm 1"),
    "group_norm_size": (1, "outputs of delta layers are normed by heads"),
    **dict.fromkeys(
        ("use_bias", "use_qkv_bias", "use_mla_nope", "use_nGPT", "up_proj_norm", "value_norm")
        + ("scale_router_input",),
        (False, "models of this family that transformers computes have none of it"),
    ),
}
_SHARE = "partial_rotary_factor"
_TAPS = tuple(f"kimi_delta/{name}_taps" for name in "qkv")


def in_ling(row: Rule) -> Rule:
    """Return a rule whose tensor has its published name on disk, and else that of transformers.

    Args:
        row: Rule with the name in transformers.
    """
    names = (key.replace(".self_attn.", ".attention.") for key in row.keys)
    names = (name.replace(".o_proj.", ".dense.") for name in names)
    return dataclasses.replace(row, keys=tuple(dict.fromkeys((*names, *row.keys))))


def _delta(name: str, key: str, in_memory: str | None = None, **options: Any) -> Rule:
    """Return the rule of a parameter of a delta layer."""
    keys = f"attention.{key}", f"self_attn.{in_memory or key}"
    return rule(f"kimi_delta/{name}", *keys, **options)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BailingHybridFamily(Family):
    """Ling 3.0."""

    name: ClassVar[str] = "bailing_hybrid"
    architecture: ClassVar[str] = "BailingHybridForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("gated_latent", None)
    recurrent: ClassVar[str | None] = "kimi_delta"
    rules = (
        *FRAME,
        *map(in_ling, LATENT_ATTENTION),
        in_ling(rule("attention/gate", "self_attn.g_proj.weight")),
        rule("kimi_delta_norm/gain", "input_layernorm.weight"),
        *(_delta(name, f"{name}_proj.weight") for name in "qkv"),
        _delta("o", "dense.weight", "o_proj.weight"),
        _delta("z", "g_proj.weight"),
        _delta("beta", "b_proj.weight"),
        _delta("norm", "o_norm.weight"),
        _delta("decay", "f_proj.weight", "forget_gate.f_proj.weight"),
        _delta("dt_bias", "dt_bias", "forget_gate.dt_bias", layout="flat"),
        _delta("a_log", "A_log", "forget_gate.A_log"),
        *(
            _delta(
                f"{name}_taps",
                f"{name}_conv1d.weight",
                "conv1d.weight",
                fused=_TAPS,
                fused_from=1,
                layout="depthwise",
            )
            for name in "qkv"
        ),
    )

    def of_files(self, config: Mapping[str, Any]) -> Family:
        """Return the family of Ling 2.5 for files of its architecture."""
        architectures: Any = config.get("architectures")
        older = FAMILIES["bailing_moe_v2_5"]
        is_older = isinstance(architectures, list) and older.architecture in architectures
        return older() if is_older else self

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        values = {USUAL_NAMES.get(name, name): value for name, value in config.items()}
        fields = Fields(_DEFAULTS | rotary_fields(values))
        for name, (supported, why) in _ONLY.items():
            fields.only(name, supported, why)
        fields.get("num_mtp_layers")  # left out, see below
        count = fields.size("num_hidden_layers")
        period = fields.get("layer_group_size", default=6)
        default = [_LINEAR if (layer + 1) % period else parts.FULL for layer in range(count)]
        kinds = parts.named_layers(fields, "layer_types", (_LINEAR, parts.FULL), default)
        latent = parts.latent_attention(fields)
        attention = GatedLatentConfig(
            **{field.name: getattr(latent, field.name) for field in dataclasses.fields(latent)}
        )
        width = fields.get("linear_head_dim", default=fields.size("head_dim"))
        heads = fields.get("linear_num_heads", default=attention.num_heads)
        is_bounded = fields.get("kda_safe_gate", default=True)
        floor = float(fields.get("kda_lower_bound", default=-5.0))
        delta = KimiDeltaConfig(
            num_heads=heads,
            num_key_heads=heads,
            head_dim=width,
            key_dim=width,
            gate_rank=None,
            decay_floor=floor if is_bounded else None,
            conv_length=fields.get("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        )
        mixers = [delta if kind == _LINEAR else attention for kind in kinds]
        arguments = read_experts(fields)
        arguments["dense"] = parts.layers_named_dense(fields, 2)
        layers = parts.layers_of(mixers, attention)
        return parts.assemble(fields, attention=attention, layers=layers, **arguments)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, KimiDeltaConfig(head_dim=128))
        kinds = [kind.mixer.is_recurrent for kind in model.kinds]
        latent = latent_fields(model, "Ling 3.0", "gated_latent")
        floor = mixer.decay_floor
        return (
            expert_fields(model)
            | latent
            | feed_forward_types_of(model)
            | {
                "layer_types": [_LINEAR if is_recurrent else parts.FULL for is_recurrent in kinds],
                "head_dim": mixer.head_dim,
                "linear_num_heads": mixer.num_heads,
                "short_conv_kernel_size": mixer.conv_length,
                "num_mtp_layers": 0,
                "kda_safe_gate": floor is not None,
                "kda_lower_bound": -5.0 if floor is None else floor,
            }
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefixes of the layers for multi-token prediction."""
        return parts.further_layers(config)


def rotary_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with one base of RoPE, and without the share of a head that it
    turns where qk_rope_head_dim says the same.

    Args:
        config: Fields of config.json, which transformers writes with a base that it does not read.
    """
    values = dict(config)
    if isinstance(values.get("rope_parameters"), Mapping):
        values["rope_parameters"] = rope = dict(values["rope_parameters"])
        if rope.get("rope_theta") is not None:
            values["rope_theta"] = rope["rope_theta"]
    for fields in (values, values.get("rope_parameters") or {}):
        share = fields.get(_SHARE)
        if share and int(share * values.get("head_dim", 0)) == values.get("qk_rope_head_dim"):
            del fields[_SHARE]
    return values
