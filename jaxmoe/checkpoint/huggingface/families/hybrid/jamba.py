# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Jamba: Mamba with normed r, b and c, and attention without positions (arXiv 2403.19887).

Attention is in every attn_layer_period-th layer, experts in every expert_layer_period-th, weighted
by a softmax over all experts. The chunk of Mamba is ours.

Longer than 120 lines: layers have no option for periods and offsets, which are found in lists of
layers here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import (
    fuse,
    mamba_fields,
    recurrent_mixer,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import PROJECTIONS, experts, norms, root, rule, swiglu
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers import MambaConfig
from jaxmoe.models.config import ModelConfig

_MAMBA = (
    *fuse("mamba", ("x", "z"), "in_proj.weight"),
    *fuse("mamba", ("x_in_bias", "z_in_bias"), "in_proj.bias"),
    *fuse("mamba", ("r", "b", "c"), "x_proj.weight"),
    rule("mamba/dt", "mamba.dt_proj.weight"),
    rule("mamba/dt_bias", "mamba.dt_proj.bias"),
    rule("mamba/a_log", "mamba.A_log", layout="in_out"),
    rule("mamba/skip", "mamba.D"),
    rule("mamba/taps", "mamba.conv1d.weight", layout="depthwise"),
    rule("mamba/bias", "mamba.conv1d.bias"),
    rule("mamba/o", "mamba.out_proj.weight"),
    rule("mamba/o_bias", "mamba.out_proj.bias"),
    rule("mamba/r_norm", "mamba.dt_layernorm.weight"),
    rule("mamba/b_norm", "mamba.b_layernorm.weight"),
    rule("mamba/c_norm", "mamba.c_layernorm.weight"),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JambaFamily(Family):
    """Jamba."""

    name: ClassVar[str] = "jamba"
    architecture: ClassVar[str] = "JambaForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    recurrent: ClassVar[str | None] = "mamba"
    rules = (
        *root("final_layernorm"),
        *norms(("attention", "mamba"), "pre_ff_layernorm"),
        *PROJECTIONS,
        *_MAMBA,
        *swiglu("feed_forward", "feed_forward"),
        *experts(
            "feed_forward",
            ("gate_proj", "up_proj", "down_proj"),
            **{"router": "router", "in_memory": "feed_forward"},
        ),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields(config)
        fields.only("sliding_window", None, "Jamba attends to all earlier tokens")
        fields.only("mamba_inner_layernorms", True, "Jamba norms what steps are computed from")
        for name in (
            "use_mamba_kernels",
            "use_mambapy",
            "use_associative_scan",
            "num_logits_to_keep",
        ):
            fields.get(name)  # how it is computed
        num_layers = fields.size("num_hidden_layers")
        width = fields.size("hidden_size")
        rank = fields.get("mamba_dt_rank", default="auto")
        mamba = MambaConfig(
            inner_dim=fields.size("mamba_expand") * width,
            state_dim=fields.size("mamba_d_state"),
            step_rank=math.ceil(width / 16) if rank == "auto" else fields.size("mamba_dt_rank"),
            conv_length=fields.size("mamba_d_conv"),
            has_conv_bias=fields.get("mamba_conv_bias", default=True),
            has_projection_bias=fields.get("mamba_proj_bias", default=False),
            inner_norms="rms",
        )
        attention = parts.grouped_attention(fields, qk_norm="none", positions="none")
        attends = _every(fields, "attn_layer", (8, 4))
        routed = _every(fields, "expert_layer", (2, 1))
        mixers = [
            attention if layer % attends[0] == attends[1] else mamba for layer in range(num_layers)
        ]
        has_experts = fields.size("num_experts", "num_local_experts") > 1
        fields.get("num_experts_per_tok")  # of experts, which there may be none of
        return parts.assemble(
            fields,
            parts.token_choice(fields, fields.size("intermediate_size")) if has_experts else None,
            attention,
            dense=tuple(i for i in range(num_layers) if has_experts and i % routed[0] != routed[1]),
            layers=parts.layers_of(mixers, attention),
        )

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, MambaConfig())
        moe = moe_of(model)
        kinds = model.kinds
        attends = _period_of("attention", [not kind.mixer.is_recurrent for kind in kinds])
        routed = _period_of("experts", [kind.feed_forward.is_routed for kind in kinds])
        return shared_fields(model) | {
            "head_dim": model.attention.head_dim,
            "intermediate_size": moe.expert_dim if model.moe else model.dense_dim,
            "num_experts": moe.num_experts if model.moe else 1,
            "router_aux_loss_coef": balance_of(model),
            "attn_layer_period": attends[0],
            "attn_layer_offset": attends[1],
            "expert_layer_period": routed[0],
            "expert_layer_offset": routed[1],
            "mamba_dt_rank": mixer.step_rank,
            **mamba_fields(model, mixer),
        }


def _every(fields: Fields, name: str, defaults: tuple[int, int]) -> tuple[int, int]:
    """Return the period and the offset of a kind of layer."""
    period = fields.get(f"{name}_period", default=defaults[0])
    offset = fields.get(f"{name}_offset", default=defaults[1])
    if offset >= period:
        raise CheckpointError(
            f"config.{name}_offset={offset} must be below config.{name}_period={period}"
        )
    return period, offset


def _period_of(what: str, flags: Sequence[bool]) -> tuple[int, int]:
    """Return the smallest period and its offset at which the flags are set.

    Raises:
        CheckpointError: There is none.
    """
    for period in range(1, len(flags) + 2):
        for offset in range(period):
            if all(flag == (i % period == offset) for i, flag in enumerate(flags)):
                return period, offset
    places = [i for i, flag in enumerate(flags) if flag]
    raise CheckpointError(
        f"layers {places} of model.layers and model.dense_layers have {what}, and jamba of"
        f" transformers has {what} in one layer of every period"
    )
