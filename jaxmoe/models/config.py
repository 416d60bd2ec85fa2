# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What is computed: `ModelConfig` and its parts. Nothing here speaks of devices.

A dimension shared by siblings belongs to their parent: E and K to the MoE layer, D to the model.
The forward multipliers of a parameterisation are mathematics and are saved with the model.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import ClassVar, Literal

from jaxmoe.routing import (
    BalancerConfig,
    CapacityConfig,
    GateConfig,
    LoadBalanceConfig,
    RenormalizedGateConfig,
    RouterConfig,
    RouterZConfig,
    SoftmaxTopKConfig,
    ZeroComputationConfig,
)
from jaxmoe.routing.composition import RoutingWarning, causal_advice, check_parts


def _positive(config: object, *fields: str) -> None:
    section = type(config).__name__.removesuffix("Config").removeprefix("Latent").lower()
    for field in fields:
        if not getattr(config, field) > 0:
            raise ValueError(f"{section}.{field}={getattr(config, field)} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Grouped-query attention with rotary positions."""

    name: ClassVar[str] = "grouped_query"

    num_heads: int = 4
    """N, query heads."""
    num_kv_heads: int = 4
    """M, key and value heads; divides num_heads."""
    head_dim: int = 32
    """H, width of one head."""
    qk_norm: Literal["none", "head", "full"] = "head"
    """RMSNorm of queries and keys: none, over each head, or over all heads together (OLMoE)."""
    is_gated: bool = False
    """Multiply each head's output by a sigmoid of the layer's input."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    window: int | None = None
    """Positions a query sees, itself included, and as many ahead where it is not causal; all when
    None."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap); off when None."""
    is_causal: bool = True
    """A token sees no later one; masked diffusion needs it to."""

    def __post_init__(self):
        _positive(self, "num_heads", "num_kv_heads", "head_dim", "rope_theta")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"attention.num_heads={self.num_heads} must be a multiple of"
                f" attention.num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"attention.head_dim={self.head_dim} must be even: RoPE turns pairs")
        if self.window is not None and self.window < 1:
            raise ValueError(f"attention.window={self.window} must be at least 1, or None for all")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"attention.softcap={self.softcap} must be above 0, or None for off")

    @property
    def value_dim(self) -> int:
        """Width of one head's values."""
        return self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """YaRN: wavelengths of RoPE stretched for rows longer than those of pretraining."""

    factor: float = 40.0
    """How much longer."""
    original_length: int = 4096
    """Positions of pretraining."""
    beta_fast: float = 32.0
    """Features that turn more often than this in the original length stay as they are."""
    beta_slow: float = 1.0
    """Features that turn less often are stretched by the whole factor."""
    mscale: float = 1.0
    """Of the size of turned features, together with mscale_all_dim."""
    mscale_all_dim: float = 1.0
    """Of the attention logits: they are multiplied by (1 + mscale_all_dim log(factor) / 10)^2."""

    def __post_init__(self):
        _positive(self, "factor", "original_length", "beta_fast", "beta_slow")
        _positive(self, "mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionConfig:
    """Multi-head latent attention: keys and values are made from one short vector per token."""

    name: ClassVar[str] = "latent"
    window: ClassVar[int | None] = None
    softcap: ClassVar[float | None] = None

    num_heads: int = 4
    """N, heads; each has keys and values of its own."""
    latent_dim: int = 64
    """Width of the vector from which keys and values are made."""
    query_latent_dim: int | None = None
    """Width of the vector from which queries are made; None: from the input itself."""
    nope_dim: int = 32
    """Width of the part of a query or key without position."""
    rope_dim: int = 16
    """Width of the part that RoPE turns; its key is shared by all heads."""
    value_dim: int = 32
    """Width of one head's values."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    rope_layout: Literal["interleaved", "halves"] = "interleaved"
    """RoPE turns features 2h and 2h + 1 together (as DeepSeek's weights have it), or h and
    h + rope_dim / 2."""
    yarn: YarnConfig | None = None
    """For rows longer than those of pretraining; None: RoPE as it is."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in the norms of the latents."""
    is_causal: bool = True
    """A token sees no later one; masked diffusion needs it to."""

    def __post_init__(self):
        fields = ("num_heads", "latent_dim", "nope_dim", "rope_dim", "value_dim", "rope_theta")
        _positive(self, *fields, "norm_epsilon")
        if self.query_latent_dim is not None and self.query_latent_dim < 1:
            raise ValueError(
                f"attention.query_latent_dim={self.query_latent_dim} must be above 0, or None for"
                " queries from the input itself"
            )
        if self.rope_dim % 2:
            raise ValueError(f"attention.rope_dim={self.rope_dim} must be even: RoPE turns pairs")

    @property
    def num_kv_heads(self) -> int:
        """M: as many as N."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """H, width of one query or key."""
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Values that a cache keeps of one token."""
        return self.latent_dim + self.rope_dim


Attentions = AttentionConfig | LatentAttentionConfig
"""The kinds of attention; each is a module of `jaxmoe/layers/`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """A Mixture-of-Experts feed-forward layer: router, gate, balancers, capacity, experts."""

    num_experts: int = 8
    """E, routed experts."""
    top_k: int = 2
    """K, routed experts per token; shared experts are not counted."""
    expert_dim: int = 128
    """F, hidden units of one expert."""
    num_shared_experts: int = 0
    """Experts that every token meets; together one SwiGLU of num_shared_experts * expert_dim."""
    router: RouterConfig = SoftmaxTopKConfig()
    """How experts are chosen."""
    gate: GateConfig = RenormalizedGateConfig()
    """What multiplies their outputs."""
    balancers: tuple[BalancerConfig, ...] = (LoadBalanceConfig(), RouterZConfig())
    """Losses that keep the load even and the logits small."""
    capacity: CapacityConfig | None = None
    """Limit per expert; dropless when None."""
    zero_computation: ZeroComputationConfig | None = None
    """Further experts that the router may choose, which compute nothing; not in num_experts."""

    def __post_init__(self):
        _positive(self, "num_experts", "top_k", "expert_dim")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k={self.top_k} must not exceed moe.num_experts={self.num_experts}"
            )
        if self.num_shared_experts < 0:
            raise ValueError(f"moe.num_shared_experts={self.num_shared_experts} must be 0 or more")
        names = [balancer.name for balancer in self.balancers]
        if len(set(names)) != len(names):
            raise ValueError(f"moe.balancers names one balancer twice: {', '.join(names)}")
        # Whatever the router has to say of the sizes it says here, and not at the first step.
        self.router.build(num_experts=self.num_routed, top_k=self.top_k, embed_dim=1)
        check_parts(self)

    @property
    def num_routed(self) -> int:
        """Experts that the router chooses from, those without computation last."""
        return self.num_experts + (self.zero_computation.total if self.zero_computation else 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardMultipliers:
    """Constant factors in the forward pass, filled in by a parameterisation."""

    embedding: float = 1.0
    """Of the embedded tokens."""
    residual: float = 1.0
    """Of each attention and feed-forward output before it is added to the residual stream."""
    logits: float = 1.0
    """Of the output logits."""
    router: float = 1.0
    """Of the router logits."""
    attention_scale: float | None = None
    """Of the attention logits; 1 / sqrt(head_dim) when None."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer."""

    vocab_size: int = 256
    """V; token ids lie in [0, V)."""
    num_layers: int = 4
    """L."""
    embed_dim: int = 128
    """D, width of the residual stream."""
    attention: Attentions = AttentionConfig()
    """Of every layer."""
    moe: MoEConfig | None = MoEConfig()
    """Of every layer that is not dense; None: all layers are dense."""
    dense_layers: tuple[int, ...] = ()
    """Layers (from 0) with a dense feed-forward instead of experts."""
    dense_dim: int = 512
    """Hidden units of a dense feed-forward layer."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in RMSNorm."""
    has_tied_embeddings: bool = False
    """The output head is the transposed embedding."""
    multipliers: ForwardMultipliers = ForwardMultipliers()
    """Forward multipliers of the parameterisation."""

    def __post_init__(self):
        _positive(self, "vocab_size", "num_layers", "embed_dim", "dense_dim", "norm_epsilon")
        wrong = [layer for layer in self.dense_layers if not 0 <= layer < self.num_layers]
        if wrong:
            raise ValueError(
                f"model.dense_layers={wrong}: layers are numbered 0 to {self.num_layers - 1}"
            )
        if tuple(sorted(set(self.dense_layers))) != self.dense_layers:
            raise ValueError(f"model.dense_layers={self.dense_layers} must ascend without repeats")
        if self.moe and self.attention.is_causal and not self.moe.router.traits.is_causal:
            raise ValueError(
                f"model.moe.router={self.moe.router.name} lets later tokens decide about earlier"
                " ones, and model.attention.is_causal=True promises that they do not: train it by"
                " masked diffusion with model.attention.is_causal=False, or take another router"
            )
        if self.moe and self.attention.is_causal:
            for text in causal_advice(self.moe):
                warnings.warn(text, RoutingWarning, stacklevel=3)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Runs of equal consecutive layers: each is one scan, named for its kind and start."""
        kinds = [
            "dense" if self.moe is None or layer in self.dense_layers else "moe"
            for layer in range(self.num_layers)
        ]
        starts = [i for i in range(self.num_layers) if i == 0 or kinds[i] != kinds[i - 1]]
        ends = [*starts[1:], self.num_layers]
        return tuple(
            Stack(f"{kinds[start]}_blocks_{start}", kinds[start] == "moe", start, end - start)
            for start, end in zip(starts, ends, strict=True)
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(stack.num_layers for stack in self.stacks if stack.is_moe)


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Consecutive layers of one kind."""

    name: str
    is_moe: bool
    first_layer: int
    num_layers: int
