# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of a model that several families share from the fields of their configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.huggingface.paths import show_value
from jaxmoe.checkpoint.huggingface.ropes import read_rope
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import (
    AttentionConfig,
    FeedForwardBase,
    ForwardMultipliers,
    LatentAttentionConfig,
    LayerConfig,
    MixerBase,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import (
    GroupLimitConfig,
    LoadBalanceConfig,
    LossFreeConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
)


def token_choice(fields: Fields, expert_dim: int) -> MoEConfig:
    """Return softmax over all experts; norm_topk_prob divides by the sum over the chosen ones.

    Args:
        fields: Fields of a config.
        expert_dim: Hidden units of one expert.
    """
    is_renormalized = fields.get("norm_topk_prob", default=False)
    gate = RenormalizedGateConfig() if is_renormalized else SoftmaxGateConfig()
    return experts(fields, expert_dim, SoftmaxTopKConfig(softmax="before"), gate)


def experts(
    fields: Fields, expert_dim: int, router: Any, gate: Any, *, num_shared_experts: int = 0
) -> MoEConfig:
    """Return the experts of a MoE layer, without balancers.

    Args:
        fields: Fields of a config.
        expert_dim: Hidden units of one expert.
        router: Config of the router.
        gate: Config of the gate.
        num_shared_experts: Experts applied to every token.
    """
    return MoEConfig(
        num_experts=fields.size("num_local_experts", "num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=expert_dim,
        router=router,
        gate=gate,
        num_shared_experts=num_shared_experts,
        balancers=(),
    )


def sigmoid_experts(fields: Fields) -> MoEConfig:
    """Return the experts of DeepSeek-V3: sigmoid scores, a bias for the choice, groups, a scale.

    Groups are ranked by their two best experts; the shared experts are as wide as the others.

    Args:
        fields: Fields of a config.
    """
    if fields.get("scoring_func") != "noaux_tc":  # dots.llm1 has the method there
        fields.only("scoring_func", "sigmoid", "these experts are scored by sigmoid")
    fields.only("topk_method", "noaux_tc", "these experts are chosen with a bias")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef"):
        fields.get(name)  # of training alone
    scale = float(fields.there("routed_scaling_factor"))
    is_renormalized = fields.get("norm_topk_prob", default=True)
    groups = _groups(fields, best_per_group=2)
    return MoEConfig(
        num_experts=fields.size("n_routed_experts", "num_local_experts", "num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=fields.size("moe_intermediate_size"),
        num_shared_experts=fields.size("n_shared_experts", "num_shared_experts"),
        router=SigmoidTopKConfig(bias=LossFreeConfig(), groups=groups),
        gate=(RenormalizedGateConfig if is_renormalized else SoftmaxGateConfig)(scale=scale),
        balancers=(),
    )


def softmax_experts_in_groups(fields: Fields) -> MoEConfig:
    """Return the experts of DeepSeek-V2: softmax scores, groups ranked by their best, a scale.

    Args:
        fields: Fields of a config.
    """
    fields.only("scoring_func", "softmax", "these experts are scored by softmax")
    fields.only("norm_topk_prob", False, "transformers does not divide these gates by their sum")
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef"):
        fields.get(name)  # of training alone
    method = fields.get("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(
            f"config.topk_method={show_value(method)} is not supported, only 'greedy' and"
            " 'group_limited_greedy'"
        )
    has_groups = method == "group_limited_greedy"
    for name in ("n_group", "topk_group"):
        fields.get(name)  # ignored by the greedy choice
    return MoEConfig(
        num_experts=fields.size("n_routed_experts", "num_experts"),
        top_k=fields.size("num_experts_per_tok"),
        expert_dim=fields.size("moe_intermediate_size"),
        num_shared_experts=fields.size("n_shared_experts"),
        router=SoftmaxTopKConfig(groups=_groups(fields, best_per_group=1) if has_groups else None),
        gate=SoftmaxGateConfig(scale=float(fields.get("routed_scaling_factor", default=1.0))),
        balancers=(),
    )


def _groups(fields: Fields, *, best_per_group: int) -> GroupLimitConfig | None:
    """Return the limit to few groups of experts; None where all groups are chosen."""
    count = fields.size("n_group")
    top = fields.size("topk_group")
    limit = GroupLimitConfig(num_groups=count, top_groups=top, best_per_group=best_per_group)
    return limit if top < count else None


def latent_attention(
    fields: Fields, *, positions: Literal["rotary", "none"] = "rotary"
) -> LatentAttentionConfig:
    """Return the attention of DeepSeek-V2 and V3.

    Args:
        fields: Fields of a config.
        positions: Whether a part of queries and keys is turned by RoPE.

    Raises:
        CheckpointError: Heads share keys, or fields that follow from others do not.
    """
    heads = fields.size("num_attention_heads")
    fields.only("num_key_value_heads", heads, "every head has keys of its own, from the latent")
    fields.get("head_dim")  # the rotary width, or nothing
    rope = read_rope(fields, 10_000.0, kinds=("yarn",))
    if rope.share != 1.0:
        raise CheckpointError(
            f"config.partial_rotary_factor={rope.share} is not supported, only 1.0: RoPE turns all"
            " qk_rope_head_dim features"
        )
    yarn: Any = rope.scaling
    attention = LatentAttentionConfig(
        num_heads=heads,
        latent_dim=fields.size("kv_lora_rank"),
        query_latent_dim=fields.size_or_null("q_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        positions=positions,
        rope_theta=rope.theta,
        yarn=yarn,
        rope_layout="interleaved" if fields.get("rope_interleave", default=True) else "halves",
    )
    fields.only("qk_head_dim", attention.head_dim, "it is qk_nope_head_dim + qk_rope_head_dim")
    return attention


def first_layers(fields: Fields) -> tuple[int, ...]:
    """Return the dense layers of a family in which the first layers are dense.

    Args:
        fields: Fields of a config.
    """
    fields.only("moe_layer_freq", 1, "here every layer after the dense ones has experts")
    first = fields.there("first_k_dense_replace")
    return tuple(range(min(first, fields.size("num_hidden_layers"))))


def sparse_steps(fields: Fields) -> tuple[int, ...]:
    """Return the dense layers of Qwen, from mlp_only_layers and decoder_sparse_step.

    Args:
        fields: Fields of a config.
    """
    step = fields.get("decoder_sparse_step") or 1
    dense_layers = frozenset(fields.get("mlp_only_layers") or ())
    count = fields.size("num_hidden_layers")
    return tuple(i for i in range(count) if i in dense_layers or (i + 1) % step)


def layers_named_dense(fields: Fields, first: int) -> tuple[int, ...]:
    """Return the dense layers of a family with `mlp_layer_types`.

    Args:
        fields: Fields of a config.
        first: Dense layers before the others, where the config names neither layers nor a number.
    """
    number = fields.get("first_k_dense_replace", default=first)
    count = fields.size("num_hidden_layers")
    default = ["dense" if layer < number else "sparse" for layer in range(count)]
    kinds = named_layers(fields, "mlp_layer_types", ("dense", "sparse"), default)
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def further_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the prefixes of layers for multi-token prediction, which follow the others.

    Args:
        config: Fields of config.json.
    """
    fields = Fields(config)
    first = fields.size("num_hidden_layers")
    count = fields.get("num_nextn_predict_layers", "num_mtp_layers", default=0)
    return tuple(f"model.layers.{layer}." for layer in range(first, first + count))


def named_layers(
    fields: Fields, name: str, kinds: Sequence[str], default: Sequence[str]
) -> tuple[str, ...]:
    """Return the kind of each layer.

    Args:
        fields: Fields of a config.
        name: Name of the field, a list of kinds.
        kinds: Kinds that are supported.
        default: Kind of each layer where the field is absent.

    Raises:
        CheckpointError: The list has another length, or a kind is not supported.
    """
    count = fields.size("num_hidden_layers")
    names = tuple(fields.get(name, default=default))
    unknown = [kind for kind in names if kind not in kinds]
    if unknown or len(names) != count:
        raise CheckpointError(
            f"config.{name}={show_value(list(names))} must name {count} layers"
            f" (num_hidden_layers), each of them one of {', '.join(kinds)}"
        )
    return names


SLIDING: Final = "sliding_attention"
"""Kind of a layer whose attention has a window."""
FULL: Final = "full_attention"
"""Kind of a layer whose attention sees all earlier tokens."""


def windowed_attention(
    fields: Fields,
    attention: AttentionConfig,
    default: Sequence[str],
    *,
    default_window: int | None = None,
) -> list[AttentionConfig]:
    """Return the attention of each layer, with a window or without by `layer_types`.

    Args:
        fields: Fields of a config.
        attention: Attention without a window.
        default: Kinds of the layers where `layer_types` is absent.
        default_window: Window where `sliding_window` is absent.

    Raises:
        CheckpointError: A kind is not supported, or there is no window for those that have one.
    """
    kinds = named_layers(fields, "layer_types", (FULL, SLIDING), default)
    window = (
        fields.get("sliding_window", default=default_window) or None
    )  # Qwen2-MoE writes 0 for none
    if SLIDING in kinds and window is None:
        raise CheckpointError("config.sliding_window is absent, and layers of layer_types have it")
    narrow = dataclasses.replace(attention, window=window)
    return [narrow if kind == SLIDING else attention for kind in kinds]


def every_so_many(fields: Fields, name: str, default: int) -> list[str]:
    """Return kinds of layers of which every so many has no window, for where `layer_types` is
    absent.

    Args:
        fields: Fields of a config.
        name: Name of the field with the number of layers.
        default: Number where the config has none.

    Raises:
        CheckpointError: The number is needed, and is none.
    """
    period = fields.get(name, default=default)
    count = fields.size("num_hidden_layers")
    if fields.get("layer_types") is not None:
        return [FULL] * count
    if type(period) is not int or period < 1:
        raise CheckpointError(
            f"config.{name}={show_value(period)} is not supported without layer_types, only an"
            " integer above 0: every so many layers one has no window"
        )
    return [SLIDING if (layer + 1) % period else FULL for layer in range(count)]


def windows_with_positions(
    fields: Fields, attention: AttentionConfig, default: Sequence[str], window: int
) -> list[AttentionConfig]:
    """Return the attention of each layer: RoPE and a window, or neither.

    Args:
        fields: Fields of a config.
        attention: Attention with RoPE and without a window.
        default: Kinds of the layers where `layer_types` is absent.
        window: Window where the config has none.
    """
    kinds = named_layers(fields, "layer_types", (FULL, SLIDING), default)
    narrow = dataclasses.replace(attention, window=fields.get("sliding_window", default=window))
    wide = dataclasses.replace(attention, positions="none")
    return [narrow if kind == SLIDING else wide for kind in kinds]


def biased_options(fields: Fields, *, has_bias: bool = False, **options: Any) -> AttentionOptions:
    """Return options in which `attention_bias` is about queries, keys, values and the output.

    Args:
        fields: Fields of a config.
        has_bias: Whether there are biases where the config does not say it.
        **options: Further options.
    """
    has_bias = fields.get("attention_bias", default=has_bias)
    return AttentionOptions(has_bias=has_bias, has_output_bias=has_bias, **options)


def grouped_attention(
    fields: Fields,
    *,
    qk_norm: Literal["none", "head", "full", "unit"],
    rope_theta: float = 10_000.0,
    rotary_share: float | None = None,
    window: int | None = None,
    positions: Literal["rotary", "none"] = "rotary",
    options: AttentionOptions | None = None,
    is_gated: bool = False,
    default_head_dim: int | None = None,
) -> AttentionConfig:
    """Return grouped-query attention.

    Args:
        fields: Fields of a config.
        qk_norm: Norm of queries and keys.
        rope_theta: Base of RoPE where the config has none.
        rotary_share: Share of a head that RoPE turns where the config has none; None for a family
            in which it turns whole heads.
        window: Positions that a query sees.
        positions: Whether queries and keys are turned by RoPE.
        options: Options of the family, the numbers of RoPE left out.
        is_gated: Whether the output of each head is multiplied by gates.
        default_head_dim: Width of a head where the config has none; hidden_size over the number of
            heads when None.

    Raises:
        CheckpointError: The width does not divide by the number of heads, or RoPE turns a part of
            a head in a family without it.
    """
    heads = fields.size("num_attention_heads")
    width = fields.size("hidden_size")
    head_dim = fields.get("head_dim", default=default_head_dim)
    if head_dim is None and width % heads:
        raise CheckpointError(
            f"config.hidden_size={width} does not divide by num_attention_heads={heads}, and there"
            " is no head_dim"
        )
    head_dim = head_dim or width // heads
    rope = read_rope(fields, rope_theta, share=rotary_share or 1.0)
    if rotary_share is None and rope.share != 1.0:
        raise CheckpointError(
            f"config.partial_rotary_factor={rope.share} is not supported, only 1.0: RoPE of this"
            " family turns whole heads"
        )
    options = dataclasses.replace(
        options or AttentionOptions(),
        rotary_dim=rope.width(head_dim),
        rope_scaling=rope.scaling,
    )
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", default=heads),
        head_dim=head_dim,
        qk_norm=qk_norm,
        rope_theta=rope.theta,
        window=window,
        positions=positions,
        is_gated=is_gated,
        options=None if options == AttentionOptions() else options,
    )


def multipliers(fields: Fields) -> ForwardMultipliers:
    """Return the multipliers of Granite.

    Args:
        fields: Fields of a config.
    """
    return ForwardMultipliers(
        embedding=float(fields.get("embedding_multiplier", default=1.0)),
        residual=float(fields.get("residual_multiplier", default=1.0)),
        logits=1.0 / fields.get("logits_scaling", default=1.0),
        attention_scale=float(fields.get("attention_multiplier", default=1.0)),
    )


def assemble(
    fields: Fields,
    moe: MoEConfig | None,
    attention: MixerBase,
    *,
    dense: tuple[int, ...] = (),
    dense_dim: int | None = None,
    layers: tuple[LayerConfig, ...] = (),
    multipliers: ForwardMultipliers | None = None,
    has_balance: bool = True,
    balance: float = 0.001,
    is_tied: bool = False,
) -> ModelConfig:
    """Return the model.

    Args:
        fields: Fields of a config.
        moe: Experts; all layers are dense when None.
        attention: Mixer of layers for which `layers` names no other.
        dense: Layers with a dense feed-forward.
        dense_dim: Hidden units of a dense feed-forward; intermediate_size when None.
        layers: Layers with other mixers.
        multipliers: Forward multipliers; all are 1 when None.
        has_balance: Whether the family has a load-balancing loss.
        balance: Its coefficient where the config does not say it.
        is_tied: Whether embeddings are tied where the config does not say it.

    Raises:
        CheckpointError: A field has a value that no family supports.
    """
    fields.check_supported()
    num_layers = fields.size("num_hidden_layers")
    width = fields.size("hidden_size")
    coefficient = fields.get("router_aux_loss_coef", default=balance)
    is_dense = moe is None or len(dense) == num_layers
    model = ModelConfig(
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        embed_dim=width,
        attention=attention,
        moe=None if is_dense else moe,
        dense_layers=() if is_dense else dense,
        dense_dim=dense_dim or fields.size("intermediate_size"),
        layers=layers,
        norm_epsilon=float(fields.there("rms_norm_eps")),
        has_tied_embeddings=fields.get("tie_word_embeddings", default=is_tied),
        multipliers=multipliers,
    )
    fields.warn_of_the_rest()
    if model.moe is None or not has_balance:
        return model
    # In transformers the loss is K for a balanced router, once for all layers; here 1 per layer.
    unit = model.moe.top_k / model.num_moe_layers
    balancers = (LoadBalanceConfig(coefficient=coefficient * unit),)
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancers=balancers))


def layers_of(
    mixers: Sequence[MixerBase],
    attention: MixerBase,
    feed_forwards: Sequence[FeedForwardBase] | None = None,
) -> tuple[LayerConfig, ...]:
    """Return the shortest period of `ModelConfig.layers` with these mixers and feed-forwards.

    Args:
        mixers: Mixer of each layer.
        attention: Mixer of the layers for which the period names none.
        feed_forwards: Feed-forward of each layer, of which the period names those that are not
            routed; where None it names none.

    Returns:
        The period; empty where all layers have `attention` and no feed-forward is named.
    """
    layers = [
        LayerConfig(
            mixer=None if mixer == attention else mixer,
            feed_forward=None if fed is None or fed.is_routed else fed,
        )
        for mixer, fed in zip(mixers, feed_forwards or [None] * len(mixers), strict=True)
    ]
    length = next(
        length
        for length in range(1, len(layers) + 1)
        if all(layer == layers[index % length] for index, layer in enumerate(layers))
    )
    period = tuple(layers[:length])
    return () if period == (LayerConfig(),) else period
