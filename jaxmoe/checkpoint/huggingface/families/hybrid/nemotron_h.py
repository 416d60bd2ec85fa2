# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3: layers of one half each, by a pattern of Mamba-2, attention, MLP, MoE.

    M E M * E     ->     (Mamba-2, MoE)  (Mamba-2, none)  (attention, MoE)

A mixer and the feed-forward behind it are one layer here; files number halves. Attention has no
positions, feed-forwards are squared ReLUs without gates. Steps of Mamba-2 have no lower bound, as
in the published models and in generation by transformers, whose whole passes bound them by
time_step_min. Longer than 120 lines since layers lack: feed-forwards without a mixer before them,
experts between projections to a narrower width (moe_latent_size), and biases of the MLP (mlp_bias).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxmoe.checkpoint.huggingface import parts
from jaxmoe.checkpoint.huggingface.describe import grouped_expert_fields, moe_of, shared_fields
from jaxmoe.checkpoint.huggingface.families.hybrid.recurrent import (
    MAMBA2,
    check_steps,
    recurrent_mixer,
)
from jaxmoe.checkpoint.huggingface.family import Family
from jaxmoe.checkpoint.huggingface.fields import Fields, usual_names
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.weights import HEAD, ROUTER_STATE, Rule
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.feed_forwards.activations import ReLUSquaredConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers import Mamba2Config
from jaxmoe.layers.single_half import NoFeedForwardConfig
from jaxmoe.models.config import DenseConfig, ModelConfig, MoEConfig

_KINDS = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
"""Letter of a half, its name in layers_block_type, and its older name."""
_OF_LAYERS = ("layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers")
_ROOTS = ("backbone", "model")
"""First part of names on disk and in memory."""


def _rules(counts: Any, names: Mapping[str, str], **options: Any) -> tuple[Rule, ...]:
    """Return rules of halves of layers from names behind `mixer.` by path."""
    return tuple(
        Rule(
            path=path,
            keys=tuple(f"{root}.layers.{{layer}}.{name}" for root in _ROOTS),
            counts=counts,
            **options,
        )
        for path, name in names.items()
    )


def _experts(path: str, name: str) -> Rule:
    """Return the rule of a matrix of the experts: one tensor for each, or one for all."""
    block = ".layers.{layer}.mixer.experts."
    on_disk = tuple(f"{root}{block}{{expert}}.{name}.weight" for root in _ROOTS)
    stacked = tuple(f"{root}{block}{name}" for root in _ROOTS)
    return Rule(path=path, keys=(*on_disk, *stacked), counts="feed_forwards")


def _of_halves(rule: Rule) -> Rule:
    """Return a rule of Mamba-2 with the names of this family."""
    names = [key.partition("{layer}.mamba.")[2] for key in rule.keys]
    keys = tuple(f"{root}.layers.{{layer}}.mixer.{name}" for root in _ROOTS for name in names)
    return dataclasses.replace(rule, keys=keys, counts="mixers")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NemotronHFamily(Family):
    """Nemotron-H and Nemotron 3."""

    name: ClassVar[str] = "nemotron_h"
    architecture: ClassVar[str] = "NemotronHForCausalLM"
    attention: ClassVar[tuple[str, str | None]] = ("grouped_query", "none")
    recurrent: ClassVar[str | None] = "mamba2"
    rules = (
        Rule(
            path="embedding/weight",
            keys=tuple(f"{root}.embeddings.weight" for root in _ROOTS),
            layout="in_out",
        ),
        Rule(path="final_norm/gain", keys=tuple(f"{root}.norm_f.weight" for root in _ROOTS)),
        Rule(path="head/weight", keys=(HEAD,)),
        *map(_of_halves, MAMBA2),
        *_rules(
            "mixers",
            {
                "mamba2_norm/gain": "norm.weight",
                "attention_norm/gain": "norm.weight",
                **{f"attention/{name}": f"mixer.{name}_proj.weight" for name in "qkvo"},
            },
        ),
        *_rules(
            "feed_forwards",
            {
                "feed_forward_norm/gain": "norm.weight",
                "feed_forward/gate_up": "mixer.up_proj.weight",
                "feed_forward/down": "mixer.down_proj.weight",
                "moe/shared/gate_up": "mixer.shared_experts.up_proj.weight",
                "moe/shared/down": "mixer.shared_experts.down_proj.weight",
                "moe/router/weight": "mixer.gate.weight",
                f"{ROUTER_STATE}/bias": "mixer.gate.e_score_correction_bias",
            },
        ),
        _experts("moe/experts/gate_up", "up_proj"),
        _experts("moe/experts/down", "down_proj"),
    )

    def model(self, config: Mapping[str, Any]) -> ModelConfig:
        """Return the model of a config."""
        names = {"layer_norm_epsilon": ("rms_norm_eps", 1e-5)}
        values = usual_names(config, (), names) | {"n_shared_experts": 1}  # one, however wide
        halves = _halves(Fields(values))
        pairs = _pairs(halves)
        fields = Fields(
            {name: value for name, value in values.items() if name not in _OF_LAYERS}
            | {"num_hidden_layers": len(pairs)}
        )
        _check(fields)
        mamba = Mamba2Config(
            num_heads=fields.size("mamba_num_heads"),
            head_dim=fields.size("mamba_head_dim"),
            state_dim=fields.size("ssm_state_size"),
            num_groups=fields.get("n_groups", "mamba_n_groups", default=8),
            conv_length=fields.get("conv_kernel", "mamba_d_conv", default=4),
            has_conv_bias=fields.get("use_conv_bias", "mamba_conv_bias", default=True),
            has_projection_bias=fields.get("use_bias", default=False),
            chunk=fields.get("chunk_size", "mamba_chunk_size", default=128),
        )
        attention = parts.grouped_attention(
            fields, qk_norm="none", positions="none", default_head_dim=128
        )
        moe = _moe(fields)
        width = fields.size("intermediate_size")
        kinds: dict[str, Any] = {
            "M": mamba,
            "*": attention,
            "-": DenseConfig(hidden_dim=width, activation=ReLUSquaredConfig()),
            "E": moe,
            "": NoFeedForwardConfig(),
        }
        mixers = [kinds[mixer] for mixer, _ in pairs]
        feed_forwards = [kinds[feed_forward] for _, feed_forward in pairs]
        return parts.assemble(
            fields,
            moe if "E" in halves else None,
            attention,
            dense_dim=width,
            layers=parts.layers_of(mixers, attention, feed_forwards),
            has_balance=False,
        )

    def left_out(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the prefix of layers for multi-token prediction."""
        del config
        return ("mtp.",)

    def fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a model."""
        mixer = recurrent_mixer(model, Mamba2Config())
        moe = moe_of(model)
        letters = ""
        for kind in model.kinds:
            letters += "M" if kind.mixer.is_recurrent else "*"
            letters += {"moe": "E", "dense": "-"}.get(kind.feed_forward.name, "")
        return (
            shared_fields(model)
            | grouped_expert_fields(model)
            | {
                "num_hidden_layers": len(letters),
                "layers_block_type": [_KINDS[letter][0] for letter in letters],
                "hybrid_override_pattern": letters,
                "head_dim": model.attention.head_dim,
                "layer_norm_epsilon": model.norm_epsilon,
                "mlp_hidden_act": "relu2",
                "moe_shared_expert_intermediate_size": moe.num_shared_units,
                "n_shared_experts": 1,
                "mamba_num_heads": mixer.num_heads,
                "mamba_head_dim": mixer.head_dim,
                "ssm_state_size": mixer.state_dim,
                "n_groups": mixer.num_groups,
                "conv_kernel": mixer.conv_length,
                "use_conv_bias": mixer.has_conv_bias,
                "use_bias": mixer.has_projection_bias,
                "chunk_size": mixer.chunk,
            }
        )


def _halves(fields: Fields) -> str:
    """Return the letter of each half.

    Raises:
        CheckpointError: A name is unknown, or the pattern has another length than the model.
    """
    letters = {name: letter for letter, names in _KINDS.items() for name in names}
    pattern = fields.get("hybrid_override_pattern")
    default = ["linear_attention", "moe", "full_attention", "mlp"] if pattern is None else pattern
    names: list[str] = list(fields.get("layers_block_type", "layer_types", default=default))
    count = fields.get("num_hidden_layers", default=len(names))
    halves = "".join(letters.get(name, name) for name in names)
    if set(halves) - set(_KINDS) or count != len(names):
        raise CheckpointError(
            f"config.layers_block_type={show_value(names)} must name {count} layers"
            f" (num_hidden_layers), each of them one of {', '.join(letters)}, or"
            f" hybrid_override_pattern by {' '.join(_KINDS)}"
        )
    return halves


def _pairs(halves: str) -> list[tuple[str, str]]:
    """Return the letters of the mixer and the feed-forward of each layer, "" for none.

    Raises:
        CheckpointError: A feed-forward has no mixer before it.
    """
    pairs: list[tuple[str, str]] = []
    for place, half in enumerate(halves):
        if half in "M*":
            pairs.append((half, ""))
        elif place and halves[place - 1] in "M*":
            pairs[-1] = (pairs[-1][0], half)
        else:
            raise CheckpointError(
                f"config.layers_block_type: layer {place} of {halves} is a feed-forward without a"
                " mixer before it, and layers here begin with a mixer"
            )
    return pairs


def _moe(fields: Fields) -> MoEConfig:
    """Return the experts, those of DeepSeek-V3 but for their activation and the shared branch."""
    moe = parts.sigmoid_experts(fields)
    shared = fields.size("moe_shared_expert_intermediate_size")
    options = None if shared == moe.expert_dim else MoEOptions(shared_dim=shared)
    return dataclasses.replace(
        moe, activation=ReLUSquaredConfig(), num_shared_experts=1, options=options
    )


def _check(fields: Fields) -> None:
    """Raise for fields with values that are not computed, and read those that change nothing."""
    check_steps(fields)
    fields.only("mlp_hidden_act", "relu2", "feed-forwards of this family are squared ReLUs")
    fields.only("mamba_hidden_act", "silu", "Mamba-2 here has SiLU")
    fields.only("moe_latent_size", None, "experts here read the residual stream itself")
    fields.only("tie_word_embeddings", False, "transformers does not tie them in this family")
    fields.get(*"expand mamba_expand".split())
    for name in (
        "num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype time_step_min time_step_max"
        " time_step_floor moe_shared_expert_overlap num_nextn_predict_layers mtp_layers_block_type"
        " mtp_hybrid_override_pattern residual_in_fp32 hidden_dropout rescale_prenorm_residual"
        " sliding_window mamba_proj_bias"
    ).split():
        fields.get(name)
