# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: Kimi Delta Attention, latent attention without positions, DeepSeek-V3's experts.

Layers are named by layer_types, or numbered from 1 in linear_attn_config. Names of fields and
tensors are those of version 5 of transformers, in memory and on disk, or of the published files.
Source: arXiv 2510.26692.

Longer than 120 lines: no layer lacks an option; fields have three spellings, and tensors two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    grouped_expert_fields,
    latent_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import LATENT_ATTENTION, ROOT, experts, rule
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Rule
from jaxmoe.contrib.linear_attention.kimi_delta import KimiDeltaConfig
from jaxmoe.models.config import ModelConfig

_LINEAR = "linear_attention"
_DEFAULTS: Final = {
    "num_attention_heads": 32,
    "q_lora_rank": None,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Values of absent fields in transformers."""
USUAL_NAMES: Final = {
    "num_experts_per_token": "num_experts_per_tok",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts",
    "num_experts": "num_local_experts",
    "model_max_length": "max_position_embeddings",
}
"""Names of fields in files, and those that other families have."""
_PUBLISHED: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields of linear_attn_config."""
_SWIGLU = {"gate_proj": ("gate_up", 0), "up_proj": ("gate_up", 1), "down_proj": ("down", None)}
_TAPS = tuple(f"kimi_delta/{name}_taps" for name in "qkv")
_DECAYS = {"decay_in": "f_a_proj.weight", "decay_out": "f_b_proj.weight"}
_DELTA: Final = {
    **{name: f"{name}_proj.weight" for name in "qkvo"},
    "gate_in": "g_a_proj.weight",
    "gate_out": "g_b_proj.weight",
    "beta": "b_proj.weight",
    "norm": "o_norm.weight",
}


def _forget(name: str, key: str, **options: Any) -> Rule:
    """Return the rule of a parameter of decays, which are a module of their own in memory."""
    keys = (f"self_attn.{key}", f"self_attn.forget_gate.{key}")
    return rule(f"kimi_delta/{name}", *keys, **options)


def _experts() -> tuple[Rule, ...]:
    """Return the rules of experts, which transformers saves stacked if they were so on disk."""
    rules = experts("block_sparse_moe", ("w1", "w3", "w2"))
    return tuple(
        dataclasses.replace(
            row, keys=(*row.keys, row.keys[1].replace(".mlp.", ".block_sparse_moe."))
        )
        for row in rules
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KimiLinearFamily(Family):
    """Kimi Linear."""

    name: ClassVar[str] = "kimi_linear"
    architecture: ClassVar[str] = "KimiLinearForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("latent", None)
    recurrent: ClassVar[str | None] = "kimi_delta"
    rules = (
        *ROOT,
        *LATENT_ATTENTION,
        rule("kimi_delta_norm/gain", "input_layernorm.weight"),
        *(rule(f"kimi_delta/{ours}", f"self_attn.{theirs}") for ours, theirs in _DELTA.items()),
        *(_forget(ours, theirs) for ours, theirs in _DECAYS.items()),
        _forget("dt_bias", "dt_bias", layout="flat"),
        _forget("a_log", "A_log", layout="head"),
        *(
            rule(
                path,
                f"self_attn.{name}_conv1d.weight",
                "self_attn.conv1d.weight",
                fused=_TAPS,
                fused_from=1,
                layout="depthwise",
            )
            for name, path in zip("qkv", _TAPS, strict=True)
        ),
        *_experts(),
        *(
            rule(
                f"{path}/{ours}",
                f"block_sparse_moe.{module}{theirs}.weight",
                f"mlp.{module}{theirs}.weight",
                half=half,
            )
            for path, module in (("feed_forward", ""), ("moe/shared", "shared_experts."))
            for theirs, (ours, half) in _SWIGLU.items()
        ),
        rule(
            f"{ROUTER_STATE}/bias",
            "block_sparse_moe.gate.e_score_correction_bias",
            "mlp.gate.e_score_correction_bias",
        ),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        values = {USUAL_NAMES.get(name, name): value for name, value in config.items()}
        published = config.get("linear_attn_config") or {}
        values |= {ours: published[name] for name, ours in _PUBLISHED.items() if name in published}
        fields = Fields({**_DEFAULTS, **values})
        fields.only("mla_use_nope", True, "attention here has no positions")
        fields.only("tie_word_embeddings", False, "transformers ties none in this family")
        fields.only("moe_router_activation_func", "sigmoid", "these experts are scored by sigmoid")
        for name in ("linear_attn_config", "use_grouped_topk", "num_nextn_predict_layers"):
            fields.get(name)  # read above, or without an effect
        count = fields.size("num_hidden_layers")
        full = published.get("full_attn_layers", range(5, count + 1, 4))
        default = [parts.FULL if layer + 1 in full else _LINEAR for layer in range(count)]
        kinds = parts.named_layers(fields, "layer_types", (_LINEAR, parts.FULL), default)
        attention = parts.latent_attention(fields, positions="none")
        width = fields.size("linear_head_dim")
        delta = KimiDeltaConfig(
            num_heads=fields.size("linear_num_heads"),
            num_key_heads=fields.size("linear_num_heads"),
            head_dim=width,
            key_dim=width,
            gate_rank=width,
            conv_length=fields.size("linear_conv_kernel_dim"),
        )
        mixers = [delta if kind == _LINEAR else attention for kind in kinds]
        first = fields.get("first_k_dense_replace", default=1)
        default = ["dense" if layer < first else "sparse" for layer in range(count)]
        halves = parts.named_layers(fields, "mlp_layer_types", ("dense", "sparse"), default)
        return parts.assemble(
            fields,
            parts.sigmoid_experts(fields),
            attention,
            dense=tuple(layer for layer, kind in enumerate(halves) if kind == "dense"),
            layers=parts.layers_of(mixers, attention),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, KimiDeltaConfig(head_dim=128))
        kinds = [kind.mixer.is_recurrent for kind in model.kinds]
        halves = ["sparse" if kind.feed_forward.is_routed else "dense" for kind in model.kinds]
        fields = (
            shared_fields(model)
            | latent_fields(model, "Kimi Linear")
            | grouped_expert_fields(model)
            | {
                "layer_types": [_LINEAR if is_recurrent else parts.FULL for is_recurrent in kinds],
                "mlp_layer_types": halves,
                "linear_num_heads": mixer.num_heads,
                "linear_head_dim": mixer.head_dim,
                "linear_conv_kernel_dim": mixer.conv_length,
            }
        )
        fields["num_local_experts"] = fields.pop("n_routed_experts")
        for name in ("rope_theta", "rope_parameters", "rope_interleave", "first_k_dense_replace"):
            fields.pop(name)
        return fields
