# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE, arXiv 2104.09864): pairs of features turn with the position.

Feature h of the first half is paired with feature h + H/2 of the second (the layout of Hugging
Face checkpoints), and turns by position * theta^(-2h/H). Angles are computed in f32.

YaRN (arXiv 2309.00071) divides the frequencies of slow features by a factor s, keeps those of fast
features, and interpolates linearly over h between them. For latent attention (DeepSeek-V3) all
logits are also multiplied by m(a)^2, m(a) = 1 + a log(s) / 10, and turned features by
m(mscale) / m(a).
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmoe.layers.context import require_positive


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnConfig:
    """YaRN: wavelengths of RoPE stretched for rows longer than those of pretraining."""

    factor: float = 40.0
    """Ratio of the longest row to the rows of pretraining."""
    original_length: int = 4096
    """Positions of pretraining."""
    beta_fast: float = 32.0
    """Features that turn more often than this in the original length stay as they are."""
    beta_slow: float = 1.0
    """Features that turn less often are stretched by the whole factor."""
    mscale: float = 1.0
    """Weight of the factor of turned features, relative to mscale_all_dim."""
    mscale_all_dim: float = 1.0
    """Weight of the attention logits' factor (1 + mscale_all_dim log(factor) / 10)^2."""

    def __post_init__(self):
        require_positive("yarn", self, "factor", "original_length", "beta_fast", "beta_slow")
        require_positive("yarn", self, "mscale", "mscale_all_dim")


def rotary_angles(
    positions: Int[Array, "#B S"], head_dim: int, theta: float, yarn: YarnConfig | None = None
) -> tuple[Float[Array, "#B S 1 H"], Float[Array, "#B S 1 H"]]:
    """Return the factors of each feature and its partner, f32: cosines, and sines with a sign.

    Args:
        positions: Positions of the tokens; B is 1 where all rows share them.
        head_dim: H, even.
        theta: Base of the wavelengths.
        yarn: Stretching for rows longer than those of pretraining.
    """
    half = head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    frequencies = jnp.float32(theta) ** -exponents
    if yarn is not None:
        frequencies = frequencies * _stretch(half, theta, yarn)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    if yarn is not None:
        size = jnp.float32(yarn_size(yarn, yarn.mscale) / yarn_size(yarn, yarn.mscale_all_dim))
        cos = size * cos
        sin = size * sin
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def yarn_size(yarn: YarnConfig, mscale: float) -> float:
    """Return m(mscale), the factor by which YaRN counters the entropy of longer rows."""
    return 1.0 + 0.1 * mscale * math.log(max(1.0, yarn.factor))


def _stretch(half: int, theta: float, yarn: YarnConfig) -> Float[Array, " H"]:
    """Return the factors by which YaRN reduces the frequencies."""

    def feature(turns: float) -> float:
        """Return the feature that turns this often in the original length."""
        return half * math.log(yarn.original_length / (turns * 2.0 * math.pi)) / math.log(theta)

    first = max(math.floor(feature(yarn.beta_fast)), 0)
    last = min(math.ceil(feature(yarn.beta_slow)), 2 * half - 1)
    share = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return jnp.asarray(share / yarn.factor + 1.0 - share, jnp.float32)


def rotate(
    x: Float[Array, "B S N H"], angles: tuple[Float[Array, "#B S 1 H"], Float[Array, "#B S 1 H"]]
) -> Float[Array, "B S N H"]:
    """Turn queries or keys by their positions.

    Args:
        x: Heads; H is even.
        angles: Result of `rotary_angles`.

    Returns:
        The turned heads, in the dtype of `x`.
    """
    cos, sin = angles
    wide = x.astype(jnp.float32)
    partner = jnp.roll(wide, x.shape[-1] // 2, axis=-1)
    return (wide * cos + partner * sin).astype(x.dtype)
