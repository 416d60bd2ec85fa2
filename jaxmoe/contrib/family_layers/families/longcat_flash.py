# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LongCat-Flash: two halves of attention and two dense feed-forwards beside experts, some of which
return their input (arXiv 2509.01322).

A layer of transformers is two layers here, see `jaxmoe.contrib.family_layers.shortcut`: tensors
are named by `pair` and `side`. transformers allocates gate and up projections of experts without
computation and never reads them; they are no parameters here, and written as 0. Layers for
multi-token prediction (model.mtp) are left out with a warning, as in transformers.

Longer than 120 lines: latent attention of the core has no scales, and no layer has two halves
of attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import numpy as np

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import latent_fields, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.family import Constant, Family
from jaxmoe.checkpoint.huggingface.fields import Fields, usual_names
from jaxmoe.checkpoint.huggingface.rules import LATENT_ATTENTION, ROOT, experts, rule, swiglu
from jaxmoe.checkpoint.huggingface.weights import ROUTER_STATE, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.contrib.family_layers.scaled_latent import ScaledLatentConfig
from jaxmoe.contrib.family_layers.shortcut import ShortcutDenseConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxmoe.routing import (
    LossFreeConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    ZeroComputationConfig,
)

_NAMES: Final = {
    "num_layers": ("pairs", 28),
    "ffn_hidden_size": ("intermediate_size", 12288),
    "expert_ffn_hidden_size": ("moe_intermediate_size", 2048),
    "moe_topk": ("num_experts_per_tok", 12),
}
"""The usual names of fields, and their defaults in transformers."""
_ONLY: Final = {
    "zero_expert_type": ("identity", "experts without computation return their input"),
    "attention_method": ("MLA", "this family has latent attention"),
    "mla_scale_q_lora": (True, "queries are scaled"),
    "mla_scale_kv_lora": (True, "latents are scaled"),
    "router_bias": (False, "the router has no bias of its logits"),
    "norm_topk_prob": (False, "gates are not divided by their sum"),
    "rope_interleave": (True, "neighbouring features turn together"),
}


def _in_pairs(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return rules of blocks for tensors of which a layer of transformers has one or two."""
    sides = ("self_attn.", "input_layernorm.", "post_attention_layernorm.")

    def name(key: str) -> str:
        for module in sides:
            key = key.replace(f".{module}", f".{module}{{side}}.")
        return key.replace("{layer}", "{pair}")

    return tuple(dataclasses.replace(row, keys=tuple(map(name, row.keys))) for row in rules)


def _experts() -> tuple[Rule, ...]:
    """Return the rules of experts; tensors of all of them have rows of those that return x."""
    rules = experts("mlp", ("gate_proj", "up_proj", "down_proj"), router="router.classifier")
    return tuple(dataclasses.replace(row, has_idle_experts=row.half is not None) for row in rules)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LongcatFlashFamily(Family):
    """LongCat-Flash."""

    name: ClassVar[str] = "longcat_flash"
    architecture: ClassVar[str] = "LongcatFlashForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("scaled_latent", None)
    rules = (
        *ROOT,
        *_in_pairs(
            (
                *LATENT_ATTENTION,
                *swiglu("feed_forward", "mlps.0"),
                *swiglu("moe/shared", "mlps.1"),
                *_experts(),
                rule(f"{ROUTER_STATE}/bias", "mlp.router.e_score_correction_bias"),
            )
        ),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        values = usual_names(config, (), _NAMES)
        pairs = Fields(values).size("pairs")
        if values.setdefault("num_hidden_layers", 2 * pairs) != 2 * pairs:
            raise CheckpointError(
                f"config.num_hidden_layers={values['num_hidden_layers']} must be twice"
                f" num_layers={pairs}: two halves of attention are one layer of this family"
            )
        if not values.get("rope_parameters"):
            values.setdefault("rope_theta", 1e7)
        fields = Fields(values)
        fields.get("pairs")
        for name, (supported, why) in _ONLY.items():
            fields.only(name, supported, why)
        latent = parts.latent_attention(fields)
        attention = ScaledLatentConfig(
            **{field.name: getattr(latent, field.name) for field in dataclasses.fields(latent)}
        )
        width = fields.size("intermediate_size")
        idle = fields.get("zero_expert_num", default=256)
        moe = MoEConfig(
            num_experts=fields.size("n_routed_experts", "num_local_experts"),
            top_k=fields.size("num_experts_per_tok"),
            expert_dim=fields.size("moe_intermediate_size"),
            num_shared_experts=1,
            router=SoftmaxTopKConfig(bias=LossFreeConfig()),
            gate=SoftmaxGateConfig(scale=float(fields.get("routed_scaling_factor", default=6.0))),
            balancers=(),
            zero_computation=_idle(idle) if idle else None,
            options=MoEOptions(shared_dim=width, routed_input="shortcut"),
        )
        pair = (LayerConfig(feed_forward=ShortcutDenseConfig(hidden_dim=width)), LayerConfig())
        return parts.assemble(fields, moe, attention, layers=pair, has_balance=False)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        moe = moe_of(model)
        free = moe.zero_computation
        fields = shared_fields(model) | latent_fields(model, "LongCat-Flash", "scaled_latent")
        for name in ("num_hidden_layers", "num_experts_per_tok", "rope_interleave"):
            del fields[name]
        return fields | {
            "num_layers": model.num_layers // 2,
            "ffn_hidden_size": moe.num_shared_units,
            "moe_topk": moe.top_k,
            "n_routed_experts": moe.num_experts,
            "zero_expert_num": 0 if free is None else free.num_copy,
            "expert_ffn_hidden_size": moe.expert_dim,
            "routed_scaling_factor": getattr(moe.gate, "scale", 1.0),
        }

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefix of the layers for multi-token prediction."""
        del config
        return ("model.mtp.",)

    def constants(self, model: ModelConfig) -> Mapping[str, Constant]:
        """Return the projections of experts without computation, which nothing reads."""
        moe = moe_of(model)
        shape = (moe.expert_dim, model.embed_dim)
        unread = Constant(shape, lambda: np.zeros(shape, np.float32), is_read=False)
        return {
            f"model.layers.{pair}.mlp.experts.{expert}.{name}_proj.weight": unread
            for pair in range(model.num_layers // 2)
            for expert in range(moe.num_experts, moe.num_routed)
            for name in ("gate", "up")
        }


def _idle(number: int) -> ZeroComputationConfig:
    """Return experts that return their input."""
    return ZeroComputationConfig(num_zero=0, num_copy=number, num_constant=0)
