# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Declares the families with recurrent layers: their configs in both directions, and their tensors.

    jamba             Mamba with normed r, b and c; attention in every attn_layer_period-th layer,
                      without positions; experts in every expert_layer_period-th layer, weighted by
                      a softmax over all experts (arXiv 2403.19887)
    granitemoehybrid  Mamba-2 and attention by layer_types; positions by RoPE or none; experts
                      beside a shared SwiGLU, or that one alone; multipliers of embedding, residual,
                      attention and logits

Sizes are those of one attention, one recurrent mixer and one width of feed-forwards. The chunk of
Mamba is ours; of Mamba-2 it is mamba_chunk_size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.rules import PROJECTIONS, experts, norms, root, rule, swiglu
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers import Mamba2Config, MambaConfig
from jaxmoe.models.config import ForwardMultipliers, ModelConfig
from jaxmoe.routing import METHODS

_EXPAND = 2
"""Channels of recurrent layers over the width, in configs of models without any."""
_KINDS = {
    "mamba": True,
    "linear_attention": True,
    "attention": False,
    "full_attention": False,
}
"""Whether a layer of a type is recurrent, under the names of versions 4 and 5."""


def jamba(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a config of `JambaForCausalLM`.

    Args:
        config: Fields of config.json.

    Raises:
        CheckpointError: A value is not supported.
    """
    fields = Fields(config)
    fields.only("sliding_window", None, "Jamba attends to all earlier tokens")
    fields.only("mamba_inner_layernorms", True, "Jamba norms what steps are computed from")
    for name in ("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"):
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


def jamba_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of `JambaForCausalLM`.

    Args:
        model: Model in its normal form.

    Raises:
        CheckpointError: Layers do not follow a period, or the channels are no multiple of D.
    """
    mixer = _recurrent(model, MambaConfig())
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
        **_mamba_fields(model, mixer),
    }


def granite_moe_hybrid(config: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a config of `GraniteMoeHybridForCausalLM`.

    Args:
        config: Fields of config.json.

    Raises:
        CheckpointError: A value is not supported.
    """
    fields = Fields(config)
    limit = fields.get("time_step_limit")
    if limit is not None and str(list(limit)) not in _NO_LIMIT:
        raise CheckpointError(
            f"config.time_step_limit={show_value(limit)} is not supported, only [0, infinity]:"
            f" steps are"
            " not bounded here"
        )
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
            f"config.position_embedding_type={show_value(turns)} is not supported, only 'rope' and"
            " 'nope' (or null): other positions are not computed here"
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
                f" intermediate_size={expert_dim}: shared experts here are as wide as the others"
            )
        count = shared // expert_dim
        head_width = {"num_shared_experts": count}
        moe = parts.experts(fields, expert_dim, method.router, method.gate, **head_width)
    for name in ("intermediate_size", "num_experts_per_tok"):
        fields.get(name)  # of experts, which there may be none of
    multipliers = ForwardMultipliers(
        embedding=float(fields.get("embedding_multiplier", default=1.0)),
        residual=float(fields.get("residual_multiplier", default=1.0)),
        logits=1.0 / fields.get("logits_scaling", default=1.0),
        attention_scale=float(fields.get("attention_multiplier", default=1.0)),
    )
    return parts.assemble(
        fields,
        moe,
        attention,
        dense_dim=shared,
        layers=parts.layers_of(mixers, attention),
        multipliers=multipliers,
    )


def granite_moe_hybrid_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of `GraniteMoeHybridForCausalLM`.

    Args:
        model: Model in its normal form.

    Raises:
        CheckpointError: The channels are no multiple of D.
    """
    mixer = _recurrent(model, _find_unused(model))
    moe = moe_of(model)
    attention: Any = model.attention
    shared = moe.num_shared_experts * moe.expert_dim
    factors = model.forward_multipliers
    scale = factors.attention_scale
    return shared_fields(model) | {
        "head_dim": attention.head_dim,
        "position_embedding_type": "rope" if attention.positions == "rotary" else "nope",
        "layer_types": [
            "mamba" if kind.mixer.is_recurrent else "attention" for kind in model.kinds
        ],
        "intermediate_size": moe.expert_dim,
        "shared_intermediate_size": shared if model.moe else model.dense_dim,
        "num_local_experts": moe.num_experts if model.moe else 0,
        "router_aux_loss_coef": balance_of(model),
        "embedding_multiplier": factors.embedding,
        "residual_multiplier": factors.residual,
        "logits_scaling": float(f"{1.0 / factors.logits:.12g}"),  # it was divided once before
        "attention_multiplier": attention.head_dim**-0.5 if scale is None else scale,
        "mamba_n_heads": mixer.num_heads,
        "mamba_d_head": mixer.head_dim,
        "mamba_n_groups": mixer.num_groups,
        "mamba_chunk_size": mixer.chunk,
        **_mamba_fields(model, mixer),
    }


def _find_unused(model: ModelConfig) -> Mamba2Config:
    """Return a mixer whose heads fill the channels that a config names without using them."""
    inner = _EXPAND * model.embed_dim
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


def _recurrent(model: ModelConfig, default: Any) -> Any:
    """Return the recurrent mixer of a model, or one to describe where it has none.

    Raises:
        CheckpointError: The model has another one.
    """
    for index, kind in enumerate(model.kinds):
        if kind.mixer.is_recurrent:
            if kind.mixer.name != default.name:
                raise CheckpointError(
                    f"layer {index} of model.layers is {kind.mixer.name}, and those of this family"
                    f" are {default.name}"
                )
            return kind.mixer
    return default


def _mamba_fields(model: ModelConfig, mixer: Any) -> dict[str, Any]:
    """Return the fields that both families have of recurrent layers."""
    is_used = any(kind.mixer.is_recurrent for kind in model.kinds)
    if is_used and mixer.inner_dim % model.embed_dim:
        raise CheckpointError(
            f"the {mixer.name} layers of model.layers have {mixer.inner_dim} channels, which must"
            f" be a multiple of model.embed_dim={model.embed_dim} (mamba_expand is an integer)"
        )
    return {
        "mamba_expand": mixer.inner_dim // model.embed_dim if is_used else _EXPAND,
        "mamba_d_state": mixer.state_dim,
        "mamba_d_conv": mixer.conv_length,
        "mamba_conv_bias": mixer.has_conv_bias,
        "mamba_proj_bias": mixer.has_projection_bias,
    }


_NO_LIMIT = ("[0.0, inf]", "[0, inf]", "[0.0, {'__float__': 'Infinity'}]", "[0.0, 'Infinity']")


def _fuse(mixer: str, names: Sequence[str], key: str, **options: Any) -> tuple[Any, ...]:
    """Return the rules of parameters of one mixer that follow one another in a tensor."""
    paths = tuple(f"{mixer}/{name}" for name in names)
    return tuple(rule(path, f"mamba.{key}", fused=paths, **options) for path in paths)


_MAMBA = (
    *_fuse("mamba", ("x", "z"), "in_proj.weight"),
    *_fuse("mamba", ("x_in_bias", "z_in_bias"), "in_proj.bias"),
    *_fuse("mamba", ("r", "b", "c"), "x_proj.weight"),
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
_INPUTS = ("z", "x", "b", "c", "dt")
_MAMBA2 = (
    *_fuse("mamba2", _INPUTS, "in_proj.weight"),
    *_fuse("mamba2", tuple(f"{name}_in_bias" for name in _INPUTS), "in_proj.bias"),
    *_fuse("mamba2", ("x_taps", "b_taps", "c_taps"), "conv1d.weight", layout="depthwise"),
    *_fuse("mamba2", ("x_bias", "b_bias", "c_bias"), "conv1d.bias"),
    rule("mamba2/dt_bias", "mamba.dt_bias"),
    rule("mamba2/a_log", "mamba.A_log"),
    rule("mamba2/skip", "mamba.D"),
    rule("mamba2/norm", "mamba.norm.weight", layout="flat"),
    rule("mamba2/o", "mamba.out_proj.weight"),
    rule("mamba2/o_bias", "mamba.out_proj.bias"),
)

JAMBA_RULES = (
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
_BLOCK = "block_sparse_moe"
GRANITE_RULES = (
    *root("norm"),
    *norms(("attention", "mamba2"), "post_attention_layernorm"),
    *PROJECTIONS,
    *_MAMBA2,
    *(
        rule(f"{path}/{ours}", f"shared_mlp.{theirs}.weight")
        for path in ("feed_forward", "moe/shared")
        for ours, theirs in (("gate_up", "input_linear"), ("down", "output_linear"))
    ),
    rule("moe/router/weight", f"{_BLOCK}.router.layer.weight", f"{_BLOCK}.router.weight"),
    *(
        rule(
            "moe/experts/gate_up",
            f"{_BLOCK}.input_linear.weight",
            f"{_BLOCK}.experts.gate_up_proj",
            half=half,
        )
        for half in (0, 1)
    ),
    rule("moe/experts/down", f"{_BLOCK}.output_linear.weight", f"{_BLOCK}.experts.down_proj"),
)
