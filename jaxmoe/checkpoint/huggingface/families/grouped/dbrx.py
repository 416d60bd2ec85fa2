# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DBRX: LayerNorm without biases, clipped queries, keys and values, gates divided by their sum.

The config has other names than those of most families, and parts of attention and of experts. The
base of RoPE is rope_theta of `attn_config`, or of `rope_parameters`. Queries, keys and values are
one tensor; w1, v1 and w2 have the rows of all experts, one behind the other (Databricks 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.ropes import rope_fields
from jaxmoe.checkpoint.huggingface.weights import HEAD, Rule
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.layers.norms import LayerNormConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RenormalizedGateConfig, SoftmaxGateConfig, SoftmaxTopKConfig

_BLOCK = "transformer.blocks.{layer}."
_ATTENTION = f"{_BLOCK}norm_attn_norm."
_EXPERTS = f"{_BLOCK}ffn.experts.mlp."
_QKV = tuple(f"attention/{name}" for name in "qkv")
_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
"""Names of fields in most families."""
_PARTS = {
    "attn_config": {
        "kv_n_heads": ("num_key_value_heads", 1),
        "attn_pdrop": ("attention_dropout", 0.0),
        "clip_qkv": ("clip_qkv", None),
        "rope_theta": ("attention_rope_theta", None),
    },
    "ffn_config": {
        "ffn_hidden_size": ("intermediate_size", 3584),
        "moe_num_experts": ("num_local_experts", 4),
        "moe_top_k": ("num_experts_per_tok", 1),
        "moe_loss_weight": ("router_aux_loss_coef", 0.01),
        "moe_jitter_eps": ("router_jitter_noise", 0.0),
        "moe_normalize_expert_weights": ("moe_normalize_expert_weights", None),
    },
}
"""Names of fields of parts in most families, and their defaults."""
