# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""JetMoE: experts of queries and outputs in attention, experts with a bias (arXiv 2404.07413).

Norms of layers have an epsilon of their own, the field is that of the last norm. The balance loss
of transformers, which counts the routers of attention too, is not read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import NORMS, ROOT, rule
from jaxmoe.contrib.family_layers.expert_heads import ExpertHeadsConfig
from jaxmoe.contrib.family_layers.output_bias import BiasedMoEConfig, LayerRmsNormConfig
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS

_NAMES = {"kv_channels": "head_dim", "activation_function": "hidden_act"}
"""The usual names of fields."""
_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6}
"""Values of absent fields in transformers."""
_KV = ("attention/k", "attention/v")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JetMoeFamily(Family):
    """JetMoE."""

    name: ClassVar[str] = "jetmoe"
    architecture: ClassVar[str] = "JetMoeForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("expert_heads", "none")
    rules = (
        *ROOT,
        *NORMS,
        *(rule(path, "self_attention.kv_proj.weight", fused=_KV) for path in _KV),
        rule("attention/q", "self_attention.experts.input_linear.weight"),
        rule("attention/o", "self_attention.experts.output_linear.weight"),
        rule("attention/o_bias", "self_attention.experts.bias"),
        rule("attention/router", "self_attention.experts.router.layer.weight"),
        *(rule("moe/experts/gate_up", "mlp.input_linear.weight", half=half) for half in (0, 1)),
        rule("moe/experts/down", "mlp.output_linear.weight"),
        rule("moe/bias", "mlp.bias"),
        rule("moe/router/weight", "mlp.router.layer.weight"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        values = {_NAMES.get(name, name): value for name, value in config.items()}
        fields = Fields(values)
        heads = fields.size("num_experts_per_tok") * fields.size("num_key_value_heads")
        fields = Fields({**_DEFAULTS, "num_attention_heads": heads, **values})
        fields.only("num_attention_heads", heads, "every expert has a query for each head of keys")
        fields.get("aux_loss_coef")  # of training alone
        options = AttentionOptions(has_output_bias=True)
        attention = parts.grouped_attention(fields, qk_norm="none", options=options)
        method = METHODS["mixtral"]
        width = fields.size("intermediate_size")
        moe = BiasedMoEConfig(
            **_fields_of(parts.experts(fields, width, method.router, method.gate))
        )
        heads_of_experts = ExpertHeadsConfig(
            **_fields_of(attention), num_experts=moe.num_experts, top_k=moe.top_k
        )
        model = parts.assemble(fields, moe, heads_of_experts, has_balance=False, is_tied=True)
        return dataclasses.replace(model, norm=LayerRmsNormConfig())

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return shared_fields(model) | {
            "kv_channels": model.attention.head_dim,
            "intermediate_size": moe.expert_dim,
            "num_local_experts": moe.num_experts,
            "activation_function": "silu",
        }


def _fields_of(config: Any) -> dict[str, Any]:
    """Return the fields of a config, for one that extends its class."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
