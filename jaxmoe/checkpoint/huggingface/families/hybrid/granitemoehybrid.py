# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Granite hybrids: Mamba-2 and attention by layer_types, experts beside a shared SwiGLU.

Positions are by RoPE or none; experts may be absent. There are multipliers of embedding, residual,
attention and logits. The chunk of Mamba-2 is mamba_chunk_size.

Longer than 120 lines: no layer lacks an option; a config gives sizes of mixers and experts that the
model may not have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import (
    balance_of,
    moe_of,
    multiplier_fields,
    shared_fields,
)
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import (
    EXPAND,
    MAMBA2,
    check_steps,
    mamba_fields,
    recurrent_mixer,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import (
    LINEAR_EXPERTS,
    PROJECTIONS,
    linear_swiglu,
    norms,
    root,
)
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers import Mamba2Config
from jaxmoe.models.config import ModelConfig
from jaxmoe.routing import METHODS

_KINDS = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}
"""Whether a layer of a type is recurrent, under the names of versions 4 and 5."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GraniteMoeHybridFamily(Family):
    """Granite 4.0."""

    name: ClassVar[str] = "granitemoehybrid"
    architecture: ClassVar[str] = "GraniteMoeHybridForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    recurrent: ClassVar[str | None] = "mamba2"
    rules = (
        *root("norm"),
        *norms(("attention", "mamba2"), "post_attention_layernorm"),
        *PROJECTIONS,
        *MAMBA2,
        *linear_swiglu("feed_forward", "shared_mlp"),
        *linear_swiglu("moe/shared", "shared_mlp"),
        *LINEAR_EXPERTS,
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        check_steps(fields)
        width = fields.size("hidden_size")
        heads = fields.size("mamba_n_heads")
        inner = fields.size("mamba_expand") * width
        head_width = fields.get("mamba_d_head", default="auto")
        head_dim = inner // heads if head_width == "auto" else fields.size("mamba_d_head")
        if heads * head_dim != inner:
            raise CheckpointError(
                f"config.mamba_n_heads={heads} heads of mamba_d_head={head_dim} must be"
                f" mamba_expand * hidden_size = {inner} channels"
            )
        mamba = Mamba2Config(
            num_heads=heads,
            head_dim=head_dim,
            state_dim=fields.size("mamba_d_state"),
            num_groups=fields.get("mamba_n_groups", default=1),
            conv_length=fields.size("mamba_d_conv"),
            has_conv_bias=fields.get("mamba_conv_bias", default=True),
            has_projection_bias=fields.get("mamba_proj_bias", default=False),
            chunk=fields.get("mamba_chunk_size", default=256),
        )
        turns = fields.get("position_embedding_type")
        if turns not in (None, "nope", "rope"):
            raise CheckpointError(
                f"config.position_embedding_type={show_value(turns)} is not supported, only"
                " 'rope' and 'nope' (or null): other positions are not computed here"
            )
        attention = parts.grouped_attention(
            fields, qk_norm="none", positions="rotary" if turns == "rope" else "none"
        )
        mixers = [mamba if is_recurrent else attention for is_recurrent in _layer_types(fields)]
        moe = None
        shared = fields.size("shared_intermediate_size")
        if fields.get("num_local_experts", default=8):
            expert_dim = fields.size("intermediate_size")
            method = METHODS["mixtral"]
            if shared % expert_dim:
                raise CheckpointError(
                    f"config.shared_intermediate_size={shared} must be a multiple of"
                    f" intermediate_size={expert_dim}: shared experts here are as wide as others"
                )
            count = shared // expert_dim
            head_width = {"num_shared_experts": count}
            moe = parts.experts(fields, expert_dim, method.router, method.gate, **head_width)
        for name in ("intermediate_size", "num_experts_per_tok"):
            fields.get(name)  # of experts, which there may be none of
        return parts.assemble(
            fields,
            moe,
            attention,
            dense_dim=shared,
            layers=parts.layers_of(mixers, attention),
            multipliers=parts.multipliers(fields),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, _find_unused(model))
        moe = moe_of(model)
        attention: Any = model.attention
        shared = moe.num_shared_experts * moe.expert_dim
        return (
            shared_fields(model)
            | multiplier_fields(model)
            | {
                "head_dim": attention.head_dim,
                "position_embedding_type": "rope" if attention.positions == "rotary" else "nope",
                "layer_types": [
                    "mamba" if kind.mixer.is_recurrent else "attention" for kind in model.kinds
                ],
                "intermediate_size": moe.expert_dim,
                "shared_intermediate_size": shared if model.moe else model.dense_dim,
                "num_local_experts": moe.num_experts if model.moe else 0,
                "router_aux_loss_coef": balance_of(model),
                "mamba_n_heads": mixer.num_heads,
                "mamba_d_head": mixer.head_dim,
                "mamba_n_groups": mixer.num_groups,
                "mamba_chunk_size": mixer.chunk,
                **mamba_fields(model, mixer),
            }
        )


def _find_unused(model: ModelConfig) -> Mamba2Config:
    """Return a mixer whose heads fill the channels that a config names without using them."""
    inner = EXPAND * model.embed_dim
    head_dim = math.gcd(inner, 64)
    return Mamba2Config(num_heads=inner // head_dim, head_dim=head_dim)


def _layer_types(fields: Fields) -> list[bool]:
    """Return whether each layer is recurrent."""
    num_layers = fields.size("num_hidden_layers")
    types = fields.get("layer_types", "layers_block_type", default=["mamba"] * num_layers)
    unknown = [kind for kind in types if kind not in _KINDS]
    if unknown or len(types) != num_layers:
        raise CheckpointError(
            f"config.layer_types={show_value(types)} must name {num_layers} layers"
            f" (num_hidden_layers),"
            f" each of them one of {', '.join(_KINDS)}"
        )
    return [_KINDS[kind] for kind in types]
