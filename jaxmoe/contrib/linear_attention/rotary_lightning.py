# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lightning attention with positions, as in Ling 2.5: no SiLU, but QK-norm, RoPE and a scale.

    q, k, v = norm(u Wq), norm(u Wk), u Wv          norm: RMSNorm of each head
    q, k    = RoPE(q) / sqrt(H), RoPE(k)            of the first rotary_dim features
    S_t, y  = as in `lightning.py`
    out     = (RMSNorm of each group of heads(y) sigmoid(u Wz)) Wo
    rate    = slope_n (1 - (l - 1) / (L - 1) + e)   head n, layer l of L from 0, e = 1e-5

Slopes fall as 2^(-8 (n + 1) / N) for N a power of 2. Others take the slopes of the next lower power
P, and then every second one of 2 P. The first layer decays faster than the rate that its number
would give in MiniMax-01: the published code counts from 1 there.
Sources: Ling 2.5 and Ring 2.5, the published `BailingMoeV2_5LinearAttention`; arXiv 2401.04658.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxmoe.contrib.linear_attention.lightning import Lightning, LightningConfig
from jaxmoe.declarations import Declaration, declare
from jaxmoe.field_docs import with_field_docs
from jaxmoe.layers.context import require_positive
from jaxmoe.layers.norms import rms_norm
from jaxmoe.layers.records import LayerInputs, TokenInputs
from jaxmoe.layers.rotary import rotary_angles, rotate_in_place
from jaxmoe.layers.sequences import positions_of
from sharding import axes as ax

_RATE_EPSILON = 1e-5


@with_field_docs
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RotaryLightningConfig(LightningConfig):
    """Lightning attention with QK-norm, RoPE and a norm of groups of heads."""

    name: ClassVar[str] = "rotary_lightning"
    axis_fields: ClassVar[Mapping[str, str]] = {ax.HEADS: "norm_groups"}

    qk_norm: bool = True
    """Whether queries and keys of each head are normed."""
    rotary_dim: int = 16
    """First features of a head that RoPE turns, an even number."""
    rope_theta: float = 10_000.0
    """Base of the rotary wavelengths."""
    norm_groups: int = 1
    """Groups of heads whose output is normed together; divides num_heads."""

    def __post_init__(self):
        LightningConfig.__post_init__(self)
        require_positive("lightning", self, "rope_theta", "norm_groups")
        if self.num_heads % self.norm_groups:
            raise ValueError(
                f"lightning.norm_groups={self.norm_groups} must divide"
                f" lightning.num_heads={self.num_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"lightning.rotary_dim={self.rotary_dim} must be an even number from 2 to"
                f" lightning.head_dim={self.head_dim}"
            )

    def rates(self, layer: LayerInputs | None) -> Float32[Array, " N"]:
        """Return by how much the logarithm of each head's state falls per token."""
        rates = jnp.asarray(slopes(self.num_heads), jnp.float32)
        if self.decay_layers is None or self.decay_layers == 1:
            return rates
        place = jnp.int32(0) if layer is None else layer.stack_layer
        number = (self.first_layer + self.layer_step * place).astype(jnp.float32)
        share = 1.0 - (number - 1.0) / (self.decay_layers - 1) + _RATE_EPSILON
        return rates * share[None]


def slopes(heads: int) -> np.ndarray:
    """Return the slopes of heads, f64.

    Args:
        heads: N.
    """
    power = 2 ** int(math.log2(heads))
    first = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    if power == heads:
        return first
    return np.concatenate([first, slopes(2 * power)[::2][: heads - power]])


class RotaryLightning(Lightning):
    """One layer of lightning attention with positions."""

    config: RotaryLightningConfig

    def heads(self, projected: dict[str, Array], tokens: TokenInputs) -> dict[str, Array]:
        """Return queries, keys and values: normed, turned and scaled."""
        config = self.config
        q, k, v = (projected[name] for name in "qkv")
        if config.qk_norm:
            q, k = (self._norm_of_head(f"{name}_norm", x) for name, x in (("q", q), ("k", k)))
        where = positions_of(tokens, self.context, self.execution, q.shape[1])
        angles = rotary_angles(where, config.rotary_dim, config.rope_theta)
        q, k = (rotate_in_place(x, angles, "halves") for x in (q, k))
        return {"q": q * jnp.asarray(config.head_dim**-0.5, q.dtype), "k": k, "v": v}

    def norm(self, y: Float32[Array, "B S n H"], axes: tuple[str, ...]) -> Float32[Array, ...]:
        """Return the output of the heads of this device, which has whole groups, normed."""
        size = self.config.num_heads // self.config.norm_groups
        groups = y.reshape(*y.shape[:2], -1, size, y.shape[-1])
        mean = jnp.mean(groups * groups, axis=(-2, -1), keepdims=True)
        return (groups * jax.lax.rsqrt(mean + jnp.float32(self.config.norm_epsilon))).reshape(
            y.shape
        )

    def _norm_of_head(self, name: str, x: Array) -> Array:
        row = Declaration(
            shape=x.shape[-1:], axes=(ax.NORM,), role="norm", matrix=None, init="ones"
        )
        return rms_norm(x, declare(self, name, row), self.context.norm_epsilon)


RotaryLightningConfig.module = RotaryLightning
