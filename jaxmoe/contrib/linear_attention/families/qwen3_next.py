# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next: Gated DeltaNet and gated attention by layer_types, experts beside a gated shared one.

Gains of norms are 1 + w, the gain after the delta rule excepted. RoPE turns a quarter of a head.
The tensors of projections have one head after another: queries and gates of attention, and all that
belongs to one head of keys in a delta layer. Layers for multi-token prediction are left out.
Sources: arXiv 2505.09388 (experts), 2412.06464 (delta rule), 2505.06708 (gates).

Longer than 120 lines: the delta rule has a matrix for each projection, and no option for tensors in
which those of one head follow one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import balance_of, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import recurrent_mixer
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.rules import (
    DENSE,
    PROJECTED_EXPERTS,
    QK_NORM,
    ROOT,
    norms,
    rule,
    swiglu,
)
from jaxmoe.checkpoint.huggingface.weights import Rule
from jaxmoe.contrib.linear_attention.gated_delta import GatedDeltaConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.norms import CentredRmsNormConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig, MoEConfig

_LINEAR = "linear_attention"
_DEFAULTS: Final = {"head_dim": 256, "norm_topk_prob": True, "router_aux_loss_coef": 0.001}
"""Values of absent fields in transformers, where they are not those of other families."""
_SIZES: Final = {
    "num_heads": ("linear_num_value_heads", 32),
    "num_key_heads": ("linear_num_key_heads", 16),
    "head_dim": ("linear_value_head_dim", 128),
    "key_dim": ("linear_key_head_dim", 128),
    "conv_length": ("linear_conv_kernel_dim", 4),
}
"""Fields of the delta rule's config, with their names and defaults in transformers."""


def delta_tensor(names: tuple[str, ...], key: str, **options: Any) -> tuple[Rule, ...]:
    """Return the rules of parameters of a delta layer that share a tensor.

    Args:
        names: Names of the parameters in the order of the tensor.
        key: Name of the tensor in its module.
        **options: Further fields of the rules.
    """
    paths = tuple(f"gated_delta/{name}" for name in names)
    fused = paths if len(paths) > 1 else ()
    return tuple(rule(path, f"linear_attn.{key}", fused=fused, **options) for path in paths)


_GATED = ("attention/q", "attention/gate")
_BY_KEY = {"heads_of": "gated_delta/q"}
SHARED_RULES: Final = (
    *ROOT,
    *norms(("attention", "gated_delta"), "post_attention_layernorm"),
    *(rule(path, "self_attn.q_proj.weight", fused=_GATED, heads_of=_GATED[0]) for path in _GATED),
    *(rule(f"attention/{name}", f"self_attn.{name}_proj.weight") for name in "kvo"),
    *QK_NORM,
    *delta_tensor(("q_taps", "k_taps", "v_taps"), "conv1d.weight", layout="depthwise"),
    *delta_tensor(("a_log",), "A_log"),
    *delta_tensor(("dt_bias",), "dt_bias"),
    *delta_tensor(("norm",), "norm.weight"),
    *delta_tensor(("o",), "out_proj.weight"),
    *PROJECTED_EXPERTS,
    *swiglu("moe/shared", "mlp.shared_expert"),
    rule("moe/shared_gate/weight", "mlp.shared_expert_gate.weight"),
)
"""Rules of all tensors but the inputs of delta layers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3NextFamily(Family):
    """Qwen3-Next."""

    name: ClassVar[str] = "qwen3_next"
    architecture: ClassVar[str] = "Qwen3NextForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "head")
    recurrent: ClassVar[str | None] = "gated_delta"
    rules = (
        *SHARED_RULES,
        *DENSE,
        *delta_tensor(("q", "k", "v", "z"), "in_proj_qkvz.weight", **_BY_KEY),
        *delta_tensor(("beta", "dt"), "in_proj_ba.weight", **_BY_KEY),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        fields = Fields({**_DEFAULTS, **config})
        count = fields.size("num_hidden_layers")
        step = fields.get("decoder_sparse_step", default=1)
        named = frozenset(fields.get("mlp_only_layers", default=()))
        dense = tuple(i for i in range(count) if i in named or (i + 1) % step)
        return assemble(fields, dense, dense_dim=fields.size("intermediate_size"))

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        dense = model.dense_layers if model.moe else range(model.num_layers)
        return delta_fields(model) | {
            "intermediate_size": model.dense_dim,
            "norm_topk_prob": moe_of(model).gate.name == "renormalized",
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(dense),
        }

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefix of layers for multi-token prediction."""
        del config
        return ("mtp.",)


def assemble(fields: Fields, dense: tuple[int, ...], *, dense_dim: int) -> ModelConfig:
    """Return a model of delta layers and gated attention.

    Args:
        fields: Fields of a config.
        dense: Layers without experts.
        dense_dim: Hidden units of their feed-forwards.
    """
    count = fields.size("num_hidden_layers")
    interval = fields.get("full_attention_interval", default=4)
    default = [_LINEAR if (layer + 1) % interval else parts.FULL for layer in range(count)]
    kinds = parts.named_layers(fields, "layer_types", (_LINEAR, parts.FULL), default)
    attention = _attention(fields)
    sizes = {ours: fields.get(theirs, default=size) for ours, (theirs, size) in _SIZES.items()}
    delta = GatedDeltaConfig(**sizes)
    mixers = [delta if kind == _LINEAR else attention for kind in kinds]
    model = parts.assemble(
        fields,
        _experts(fields),
        attention,
        dense=dense,
        dense_dim=dense_dim,
        layers=parts.layers_of(mixers, attention),
    )
    return dataclasses.replace(model, norm=CentredRmsNormConfig())


def _attention(fields: Fields) -> AttentionConfig:
    """Return attention with a gate for each feature of a head."""
    attention = parts.grouped_attention(fields, qk_norm="head", rotary_share=0.25)
    options = dataclasses.replace(attention.extras, gate_form="element")
    return dataclasses.replace(attention, is_gated=True, options=options)


def _experts(fields: Fields) -> MoEConfig:
    """Return the experts, and the shared branch with a gate."""
    width = fields.size("moe_intermediate_size")
    shared = fields.size("shared_expert_intermediate_size")
    is_multiple = shared % width == 0
    return dataclasses.replace(
        parts.token_choice(fields, width),
        num_shared_experts=shared // width if is_multiple else 1,
        options=MoEOptions(shared_dim=None if is_multiple else shared, has_shared_gate=True),
    )


def delta_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model of delta layers and gated attention.

    Args:
        model: Model in its normal form.
    """
    mixer = recurrent_mixer(model, GatedDeltaConfig())
    moe = moe_of(model)
    fields = shared_fields(model)
    share = {"partial_rotary_factor": fields.get("partial_rotary_factor", 1.0)}
    kinds = [kind.mixer.is_recurrent for kind in model.kinds]
    return (
        fields
        | share
        | {theirs: getattr(mixer, ours) for ours, (theirs, _) in _SIZES.items()}
        | {
            "rope_parameters": fields["rope_parameters"] | share,
            "head_dim": model.attention.head_dim,
            "layer_types": [_LINEAR if is_recurrent else parts.FULL for is_recurrent in kinds],
            "num_experts": moe.num_experts,
            "moe_intermediate_size": moe.expert_dim,
            "shared_expert_intermediate_size": moe.num_shared_units,
            "router_aux_loss_coef": balance_of(model),
        }
    )
