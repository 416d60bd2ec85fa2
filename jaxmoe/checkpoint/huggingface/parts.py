# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the parts of a model that several families share from the fields of their configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxmoe.checkpoint.huggingface.fields import Fields
from jaxmoe.checkpoint.manifest import CheckpointError
from jaxmoe.models.config import (
    AttentionConfig,
    ForwardMultipliers,
    LayerConfig,
    MixerBase,
    ModelConfig,
    MoEConfig,
)
from jaxmoe.routing import (
    LoadBalanceConfig,
    RenormalizedGateConfig,
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


def grouped_attention(
    fields: Fields,
    *,
    qk_norm: Literal["none", "head", "full"],
    rope_theta: float = 10_000.0,
    window: int | None = None,
    positions: Literal["rotary", "none"] = "rotary",
) -> AttentionConfig:
    """Return grouped-query attention.

    Args:
        fields: Fields of a config.
        qk_norm: Norm of queries and keys.
        rope_theta: Base of RoPE where the config has none.
        window: Positions that a query sees.
        positions: Whether queries and keys are turned by RoPE.

    Raises:
        CheckpointError: The width does not divide by the number of heads.
    """
    heads = fields.size("num_attention_heads")
    width = fields.size("hidden_size")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"config.hidden_size={width} does not divide by num_attention_heads={heads}, and there"
            " is no head_dim"
        )
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads", default=heads),
        head_dim=fields.get("head_dim", default=width // heads),
        qk_norm=qk_norm,
        rope_theta=fields.rope_theta(rope_theta),
        window=window,
        positions=positions,
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

    Raises:
        CheckpointError: A field has a value that no family supports.
    """
    fields.check_supported()
    num_layers = fields.size("num_hidden_layers")
    width = fields.size("hidden_size")
    coefficient = fields.get("router_aux_loss_coef", default=0.0)
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
        has_tied_embeddings=fields.get("tie_word_embeddings", default=False),
        multipliers=multipliers,
    )
    fields.warn_of_the_rest()
    if model.moe is None or not has_balance:
        return model
    # In transformers the loss is K for a balanced router, once for all layers; here 1 per layer.
    unit = model.moe.top_k / model.num_moe_layers
    balancers = (LoadBalanceConfig(coefficient=coefficient * unit),)
    return dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancers=balancers))


def layers_of(mixers: Sequence[MixerBase], attention: MixerBase) -> tuple[LayerConfig, ...]:
    """Return the shortest period of `ModelConfig.layers` with these mixers.

    Args:
        mixers: Mixer of each layer.
        attention: Mixer of the layers for which the period names none.

    Returns:
        The period; empty where all layers have `attention`.
    """
    layer_mixers = [None if mixer == attention else mixer for mixer in mixers]
    length = next(
        length
        for length in range(1, len(layer_mixers) + 1)
        if all(mixer == layer_mixers[index % length] for index, mixer in enumerate(layer_mixers))
    )
    period = layer_mixers[:length]
    return () if period == [None] else tuple(LayerConfig(mixer=mixer) for mixer in period)
