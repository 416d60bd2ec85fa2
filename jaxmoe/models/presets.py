# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Builds models by name, at their published sizes: `PRESETS["qwen3_30b_a3b"]()`.

    tiny              a laptop's CPU
    d8 d12 ... d24    the ladder of HyperP: the depth decides every other size
    olmoe_1b_7b       arXiv 2409.02060
    mixtral_8x7b      arXiv 2401.04088
    qwen3_30b_a3b     arXiv 2505.09388; qwen3_235b_a22b
    deepseek_v2_lite  arXiv 2405.04434
    deepseek_v3       arXiv 2412.19437, without its layer for multi-token prediction
    glm_4_5_air       arXiv 2508.06471
    gpt_oss_20b       arXiv 2508.10925; gpt_oss_120b
    minimax_m2        its config.json; there is no paper

The ladder (arXiv 2603.28743, the configuration of its mixture-of-experts runs), for depth d:

    width 128 d, 2 d query heads and 4 key-value heads of 128, a gate per head, QK-norm per head
    dense hidden width 4 * 128 d, granularity 8: 7 of 64 routed experts, and one shared
    tokens: 50 per parameter of the dense model of the same width (`jaxmoe.models.sizing`)

The paper counts the shared expert, 8 of 64 at sparsity 8, and so routes to 63, a number that no
usual number of devices divides. Here 64 are routed: active parameters, tokens and rates are the
paper's, sparsity is 65/8, and `ladder(depth, num_experts=63)` is the paper's model.

Router and balance losses come from `jaxmoe.routing.METHODS`, with the papers' coefficients for each
layer; OLMoE's are those of its training code, which averages over layers, and those of gpt-oss and
MiniMax-M2 those of their config.json, which averages, too. Sizes of published models are those of
their config.json, which `jaxmoe.checkpoint.huggingface` reads.

To add a preset: a function and a line in `PRESETS` in jaxmoe/models/presets.py, and its published
parameter counts in tests/jaxmoe/models/test_presets.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from jaxmoe import routing
from jaxmoe.layers.feed_forwards.activations import ClampedSwiGLUConfig
from jaxmoe.layers.feed_forwards.moe.config import MoEOptions
from jaxmoe.layers.mixers.attention_parts import AttentionOptions
from jaxmoe.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    MoEConfig,
    YarnConfig,
)
from jaxmoe.models.sizing import moe_sizes, training_tokens
from jaxmoe.routing import METHODS, LoadBalanceConfig, RouterZConfig

LADDER_DEPTHS: Final = (8, 12, 16, 20, 24)
_LADDER_VOCAB: Final = 32_000
_GRANULARITY: Final = 8
_ROUTED_EXPERTS: Final = 64


def tiny() -> ModelConfig:
    """Return four layers of eight experts on bytes: 2.7 million parameters, 0.9 million active."""
    return ModelConfig(
        vocab_size=256,
        num_layers=4,
        embed_dim=128,
        attention=AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=32),
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=192),
    )


def ladder(depth: int, *, num_experts: int = _ROUTED_EXPERTS) -> ModelConfig:
    """Return a model of the HyperP ladder.

    Args:
        depth: Number of layers; even, because 4 key-value heads must divide 2 * depth query heads.
        num_experts: Number of routed experts; 63 in the paper.

    Raises:
        ValueError: A depth that is odd or below 2.
    """
    if depth < 2 or depth % 2:
        raise ValueError(
            f"the ladder has even depths from 2 on, not {depth}: 4 key-value heads divide its"
            " 2 * depth query heads"
        )
    width = 128 * depth
    sizes = moe_sizes(4 * width, granularity=_GRANULARITY, sparsity=_GRANULARITY)
    return ModelConfig(
        vocab_size=_LADDER_VOCAB,
        num_layers=depth,
        embed_dim=width,
        attention=AttentionConfig(
            num_heads=2 * depth, num_kv_heads=4, head_dim=128, qk_norm="head", is_gated=True
        ),
        moe=MoEConfig(
            **(sizes | {"num_experts": num_experts}),
            **METHODS["hyperp"].parts(),
        ),
        dense_dim=4 * width,
        norm_epsilon=1e-5,
    )


def ladder_tokens(depth: int) -> int:
    """Return the training tokens of a depth: 10.4e9 at 8, in proportion to `dense_parameters`."""
    return training_tokens(ladder(depth))


def olmoe_1b_7b() -> ModelConfig:
    """Return OLMoE-1B-7B-0924: 6.92e9 parameters, 1.28e9 active; 8 of 64 experts."""
    layers = 16
    top_k = 8
    # Its training code (MegaBlocks with pull request 133) divides both losses by the layers, which
    # are added here, and the z-loss by top_k as well.
    balancers = (
        LoadBalanceConfig(coefficient=0.01 / layers),
        RouterZConfig(coefficient=0.001 / (layers * top_k)),
    )
    parts: dict[str, Any] = METHODS["olmoe"].parts() | {"balancers": balancers}
    return ModelConfig(
        vocab_size=50_304,
        num_layers=layers,
        embed_dim=2048,
        attention=AttentionConfig(num_heads=16, num_kv_heads=16, head_dim=128, qk_norm="full"),
        moe=MoEConfig(num_experts=64, top_k=top_k, expert_dim=1024, **parts),
        dense_dim=1024,
        norm_epsilon=1e-5,
    )


def mixtral_8x7b() -> ModelConfig:
    """Return Mixtral-8x7B-v0.1: 46.7e9 parameters, 12.9e9 active; 2 of 8 experts."""
    return ModelConfig(
        vocab_size=32_000,
        num_layers=32,
        embed_dim=4096,
        attention=AttentionConfig(
            num_heads=32, num_kv_heads=8, head_dim=128, qk_norm="none", rope_theta=1e6
        ),
        moe=MoEConfig(num_experts=8, top_k=2, expert_dim=14_336, **METHODS["mixtral"].parts()),
        dense_dim=14_336,
        norm_epsilon=1e-5,
    )


def qwen3_30b_a3b() -> ModelConfig:
    """Return Qwen3-30B-A3B: 30.5e9 parameters, 3.3e9 active; 8 of 128 experts."""
    return ModelConfig(
        vocab_size=151_936,
        num_layers=48,
        embed_dim=2048,
        attention=AttentionConfig(
            num_heads=32, num_kv_heads=4, head_dim=128, qk_norm="head", rope_theta=1e6
        ),
        moe=MoEConfig(num_experts=128, top_k=8, expert_dim=768, **METHODS["qwen3"].parts()),
        dense_dim=6144,
        norm_epsilon=1e-6,
    )


def qwen3_235b_a22b() -> ModelConfig:
    """Return Qwen3-235B-A22B: 235e9 parameters, 22e9 active; 8 of 128 experts."""
    return dataclasses.replace(
        qwen3_30b_a3b(),
        num_layers=94,
        embed_dim=4096,
        attention=AttentionConfig(
            num_heads=64, num_kv_heads=4, head_dim=128, qk_norm="head", rope_theta=1e6
        ),
        moe=MoEConfig(num_experts=128, top_k=8, expert_dim=1536, **METHODS["qwen3"].parts()),
        dense_dim=12_288,
    )


def deepseek_v2_lite() -> ModelConfig:
    """Return DeepSeek-V2-Lite: 15.7e9 parameters, 2.7e9 active; 6 of 64 experts and 2 shared."""
    return ModelConfig(
        vocab_size=102_400,
        num_layers=27,
        embed_dim=2048,
        attention=LatentAttentionConfig(
            num_heads=16,
            latent_dim=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            yarn=YarnConfig(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
        ),
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            expert_dim=1408,
            num_shared_experts=2,
            router=routing.SoftmaxTopKConfig(softmax="before"),
            gate=routing.SoftmaxGateConfig(),
            balancers=(LoadBalanceConfig(coefficient=0.001, scope="sequence"),),
        ),
        dense_layers=(0,),
        dense_dim=10_944,
    )


def deepseek_v3() -> ModelConfig:
    """Return DeepSeek-V3: 671e9 parameters, 37e9 active; 8 of 256 experts and one shared."""
    parts: dict[str, Any] = METHODS["deepseek_v3"].parts()
    groups = routing.GroupLimitConfig(num_groups=8, top_groups=4, best_per_group=2)
    router = dataclasses.replace(parts["router"], groups=groups)
    return ModelConfig(
        vocab_size=129_280,
        num_layers=61,
        embed_dim=7168,
        attention=LatentAttentionConfig(
            num_heads=128,
            latent_dim=512,
            query_latent_dim=1536,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            yarn=YarnConfig(factor=40.0),
        ),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            expert_dim=2048,
            num_shared_experts=1,
            **(parts | {"router": router}),
        ),
        dense_layers=(0, 1, 2),
        dense_dim=18_432,
    )


def glm_4_5_air() -> ModelConfig:
    """Return GLM-4.5-Air: 107e9 parameters, 13.4e9 active; 8 of 128 experts and one shared."""
    parts: dict[str, Any] = METHODS["deepseek_v3"].parts() | {
        "gate": routing.RenormalizedGateConfig()
    }
    return ModelConfig(
        vocab_size=151_552,
        num_layers=46,
        embed_dim=4096,
        attention=AttentionConfig(
            num_heads=96,
            num_kv_heads=8,
            head_dim=128,
            qk_norm="none",
            rope_theta=1e6,
            options=AttentionOptions(has_bias=True, rotary_dim=64),
        ),
        moe=MoEConfig(num_experts=128, top_k=8, expert_dim=1408, num_shared_experts=1, **parts),
        dense_layers=(0,),
        dense_dim=10_944,
        norm_epsilon=1e-5,
    )


def gpt_oss(num_layers: int, num_experts: int) -> ModelConfig:
    """Return a model of gpt-oss: windows of 128 keys and whole attention in turn, with sinks.

    Args:
        num_layers: Number of layers.
        num_experts: Number of experts, of which 4 take a token.
    """
    attention = AttentionConfig(
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        qk_norm="none",
        rope_theta=150_000.0,
        options=AttentionOptions(
            has_bias=True,
            has_output_bias=True,
            has_sinks=True,
            rope_scaling=YarnConfig(factor=32.0, mscale=None, mscale_all_dim=None, truncate=False),
        ),
    )
    return ModelConfig(
        vocab_size=201_088,
        num_layers=num_layers,
        embed_dim=2880,
        attention=dataclasses.replace(attention, window=128),
        layers=(LayerConfig(), LayerConfig(mixer=attention)),
        moe=MoEConfig(
            num_experts=num_experts,
            top_k=4,
            expert_dim=2880,
            activation=ClampedSwiGLUConfig(),
            router=routing.SoftmaxTopKConfig(softmax="after", logit_bias=routing.LogitBiasConfig()),
            gate=routing.SoftmaxGateConfig(),
            balancers=(LoadBalanceConfig(coefficient=0.9 * 4 / num_layers),),
            options=MoEOptions(has_expert_bias=True),
        ),
        dense_dim=2880,
        norm_epsilon=1e-5,
    )


def minimax_m2() -> ModelConfig:
    """Return MiniMax-M2: 229e9 parameters, 11.0e9 active; 8 of 256 experts."""
    parts: dict[str, Any] = METHODS["loss_free"].parts()
    return ModelConfig(
        vocab_size=200_064,
        num_layers=62,
        embed_dim=3072,
        attention=AttentionConfig(
            num_heads=48,
            num_kv_heads=8,
            head_dim=128,
            qk_norm="full",
            rope_theta=5e6,
            options=AttentionOptions(rotary_dim=64),
        ),
        moe=MoEConfig(num_experts=256, top_k=8, expert_dim=1536, **parts),
        dense_dim=1536,
    )


PRESETS: Final[dict[str, Callable[[], ModelConfig]]] = {
    "tiny": tiny,
    **{f"d{depth}": partial(ladder, depth) for depth in LADDER_DEPTHS},
    "olmoe_1b_7b": olmoe_1b_7b,
    "mixtral_8x7b": mixtral_8x7b,
    "qwen3_30b_a3b": qwen3_30b_a3b,
    "qwen3_235b_a22b": qwen3_235b_a22b,
    "deepseek_v2_lite": deepseek_v2_lite,
    "deepseek_v3": deepseek_v3,
    "glm_4_5_air": glm_4_5_air,
    "gpt_oss_20b": partial(gpt_oss, 24, 32),
    "gpt_oss_120b": partial(gpt_oss, 36, 128),
    "minimax_m2": minimax_m2,
}
