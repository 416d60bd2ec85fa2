# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hunyuan: QK-norm over each head behind RoPE, experts beside a shared one of their width.

RoPE of type "dynamic" with `alpha` is plain RoPE of base theta alpha^(H / (H - 2)), for rows of any
length: a model keeps that base alone, and is exported with it. `moe_topk` may be a list, one number
for each layer; they must be equal (technical report of Hunyuan-A13B).

Longer than 120 lines: RoPE of the core has no `alpha`, and no layer has a list of top_k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import bias_fields, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import (
    ATTENTION,
    ATTENTION_BIASES,
    ROOT,
    experts,
    rule,
    swiglu,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import RenormalizedGateConfig, SoftmaxTopKConfig

_PER_LAYER = ("moe_topk", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")
_ROPES = ("rope_parameters", "rope_scaling")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HunyuanMoeFamily(Family):
    """Hunyuan-A13B."""

    name: ClassVar[str] = "hunyuan_v1_moe"
    architecture: ClassVar[str] = "HunYuanMoEV1ForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    rules = (
        *ROOT,
        *ATTENTION,
        *ATTENTION_BIASES,
        rule("attention/q_norm", "self_attn.query_layernorm.weight"),
        rule("attention/k_norm", "self_attn.key_layernorm.weight"),
        *experts("mlp", ("gate_proj", "up_proj", "down_proj"), router="gate.wg"),
        *swiglu("moe/shared", "mlp.shared_mlp"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(_with_plain_rope(_with_single_numbers(config)))
        for name in ("use_qk_norm", "use_mixed_mlp_moe"):
            fields.only(name, True, "transformers computes this model alone")
        for name in ("use_cla", "use_mla", "mlp_bias"):
            fields.only(name, False, "transformers computes this model alone")
        fields.get("attention_dropout")  # of training; 0.1 in the published config
        fields.only("num_shared_expert", 1, "there is one shared expert, as wide as the others")
        width = fields.size("intermediate_size")
        fields.only("moe_intermediate_size", width, "experts are intermediate_size wide")
        options = dataclasses.replace(parts.biased_options(fields), qk_norm_place="after")
        fields.get("moe_topk", "num_experts_per_tok")  # two names of one field
        router = SoftmaxTopKConfig()
        moe = parts.experts(fields, width, router, RenormalizedGateConfig(), num_shared_experts=1)
        return parts.assemble(
            fields,
            moe,
            parts.grouped_attention(fields, qk_norm="head", options=options),
            has_balance=False,
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        return (
            shared_fields(model)
            | bias_fields(model)
            | {
                "head_dim": model.attention.head_dim,
                "intermediate_size": moe.expert_dim,
                "num_experts": moe.num_experts,
                "moe_topk": moe.top_k,
            }
        )


def _with_single_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with one number in place of equal ones for all layers."""
    singles = dict(config)
    for name in _PER_LAYER:
        value = config.get(name)
        if isinstance(value, list) and len(set(map(repr, value))) != 1:
            raise CheckpointError(
                f"config.{name}={show_value(value)} is not supported: all layers here have equal"
                " experts"
            )
        singles[name] = value[0] if isinstance(value, list) else value
    singles["num_experts_per_tok"] = singles["num_experts_per_tok"] or singles["moe_topk"]
    return singles


def _with_plain_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the base that `alpha` stands for, if it has one."""
    ropes = [rope for name in _ROPES if (rope := config.get(name))]
    alphas = {rope["alpha"] for rope in ropes if rope.get("alpha")}
    kinds = {rope.get("rope_type", rope.get("type")) for rope in ropes}
    thetas = {config.get("rope_theta"), *(rope.get("rope_theta") for rope in ropes)} - {None}
    if len(alphas) != 1 or len(thetas) > 1 or kinds != {"dynamic"}:
        return config
    theta = thetas.pop() if thetas else 10_000.0
    fields = Fields(config)
    heads = fields.size("num_attention_heads")
    head_dim = fields.get("head_dim", default=fields.size("hidden_size") // heads)
    if head_dim < 4:
        raise CheckpointError(f"config.head_dim={head_dim} must be at least 4 for RoPE with alpha")
    base = theta * alphas.pop() ** (head_dim / (head_dim - 2))
    return {key: value for key, value in config.items() if key not in _ROPES} | {"rope_theta": base}
