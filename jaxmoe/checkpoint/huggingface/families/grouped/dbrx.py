# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DBRX: LayerNorm without biases, clipped queries, keys and values, gates divided by their sum.

Most fields have other names than in other families, and stand in `attn_config` and `ffn_config`.
Queries, keys and values are one tensor; w1, v1 and w2 have the rows of all experts, one behind the
other. The base of RoPE is that of `attn_config` or of `rope_parameters`, which must be equal.

Longer than 120 lines: no layer lacks an option; all fields and tensors have names of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields, usual_names
from jaxmoe.checkpoint.huggingface.weights import HEAD, WTE, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.layers.norms import LayerNormConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RenormalizedGateConfig, SoftmaxGateConfig, SoftmaxTopKConfig

_ATTENTION = "transformer.blocks.{layer}.norm_attn_norm."
_FFN = "transformer.blocks.{layer}.ffn."
_QKV = tuple(f"attention/{name}" for name in "qkv")
_NAMES = {
    "d_model": ("hidden_size", None),
    "n_heads": ("num_attention_heads", None),
    "n_layers": ("num_hidden_layers", None),
    "max_seq_len": ("max_position_embeddings", 2048),
    "attn_config.kv_n_heads": ("num_key_value_heads", 1),
    "attn_config.attn_pdrop": ("attention_dropout", 0.0),
    "attn_config.clip_qkv": ("clip_qkv", None),
    "attn_config.rope_theta": ("rope_theta", None),
    "ffn_config.ffn_hidden_size": ("intermediate_size", 3584),
    "ffn_config.moe_num_experts": ("num_local_experts", 4),
    "ffn_config.moe_top_k": ("num_experts_per_tok", 1),
    "ffn_config.moe_loss_weight": ("router_aux_loss_coef", 0.01),
    "ffn_config.moe_jitter_eps": ("router_jitter_noise", 0.0),
}
"""Names of fields in other families, and their defaults."""
_PARTS = ("attn_config", "ffn_config")
_EPSILON = 1e-5
_NORMALIZED = "moe_normalize_expert_weights"


def _experts(half: int | None, name: str, **layout: Any) -> Rule:
    path = "moe/experts/down" if half is None else "moe/experts/gate_up"
    key = f"{_FFN}experts.mlp.{name}"
    return Rule(path=path, keys=(key,), half=half, experts="rows", **layout)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DbrxFamily(Family):
    """DBRX."""

    name: ClassVar[str] = "dbrx"
    architecture: ClassVar[str] = "DbrxForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    rules = (
        Rule(path="embedding/weight", keys=(WTE,), layout="in_out"),
        Rule(path="final_norm/gain", keys=("transformer.norm_f.weight",)),
        Rule(path="head/weight", keys=(HEAD,)),
        Rule(path="attention_norm/gain", keys=(f"{_ATTENTION}norm_1.weight",)),
        Rule(path="feed_forward_norm/gain", keys=(f"{_ATTENTION}norm_2.weight",)),
        *(Rule(path=path, keys=(f"{_ATTENTION}attn.Wqkv.weight",), fused=_QKV) for path in _QKV),
        Rule(path="attention/o", keys=(f"{_ATTENTION}attn.out_proj.weight",)),
        Rule(path="moe/router/weight", keys=(f"{_FFN}router.layer.weight",)),
        _experts(0, "w1"),
        _experts(1, "v1"),
        _experts(None, "w2", layout="in_out"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(usual_names(config, _PARTS, _NAMES) | {"rms_norm_eps": _EPSILON})
        for name in ("resid_pdrop", "emb_pdrop"):
            fields.only(name, 0.0, "there is no dropout here; set it to 0 if it was for training")
        fields.only("tie_word_embeddings", False, "transformers does not tie them")
        fields.only("ffn_act_fn", {"name": "silu"}, "every feed-forward here is a SwiGLU")
        is_renormalized = (config.get("ffn_config") or {}).get(_NORMALIZED, 1.0) is not None
        fields.only(_NORMALIZED, 1.0, "gates are divided by their sum, or not at all")
        gate = RenormalizedGateConfig() if is_renormalized else SoftmaxGateConfig()
        width = fields.size("intermediate_size")
        options = AttentionOptions(qkv_clip=fields.get("clip_qkv"))
        model = parts.assemble(
            fields,
            parts.experts(fields, width, SoftmaxTopKConfig(), gate),
            parts.grouped_attention(fields, qk_norm="none", options=options),
        )
        return dataclasses.replace(model, norm=LayerNormConfig())

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        attention: Any = model.attention
        if attention.extras.qkv_clip is None:
            raise CheckpointError("DBRX clips queries, keys and values, and this model does not")
        fields = shared_fields(model)
        names = ("rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings")
        rope = {name: fields[name] for name in names if name in fields}
        return rope | {
            "vocab_size": model.vocab_size,
            "d_model": model.embed_dim,
            "n_heads": attention.num_heads,
            "n_layers": model.num_layers,
            "tie_word_embeddings": model.has_tied_embeddings,
            "attn_config": {
                "attn_pdrop": 0.0,
                "clip_qkv": attention.extras.qkv_clip,
                "kv_n_heads": attention.num_kv_heads,
                "rope_theta": attention.rope_theta,
            },
            "ffn_config": {
                "hidden_size": model.embed_dim,
                "ffn_act_fn": {"name": "silu"},
                "ffn_hidden_size": moe.expert_dim,
                "moe_num_experts": moe.num_experts,
                "moe_top_k": moe.top_k,
                "moe_jitter_eps": 0.0,
                "moe_loss_weight": balance_of(model),
                _NORMALIZED: 1.0 if moe.gate.name == "renormalized" else None,
            },
        }
