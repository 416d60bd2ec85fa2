# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE, arXiv 2104.09864): pairs of features turn with the position.

Feature h of the first half is paired with feature h + H/2 of the second (the layout of Hugging
Face checkpoints), and turns by position * theta^(-2h/H). Angles are computed in f32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_angles(
    positions: Int[Array, "#B S"], head_dim: int, theta: float
) -> tuple[Float[Array, "#B S 1 H"], Float[Array, "#B S 1 H"]]:
    """What each feature and its partner are multiplied by, f32: cosines, and sines with a sign.

    Args:
        positions: B may be 1, for positions shared by all rows.
        head_dim: H, even.
        theta: base of the wavelengths.
    """
    half = head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    frequencies = jnp.float32(theta) ** -exponents
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def rotate(
    x: Float[Array, "B S N H"], angles: tuple[Float[Array, "#B S 1 H"], Float[Array, "#B S 1 H"]]
) -> Float[Array, "B S N H"]:
    """Turns queries or keys by their positions.

    Args:
        x: heads; H is even.
        angles: from `rotary_angles`.

    Returns:
        In the dtype of `x`.
    """
    cos, sin = angles
    wide = x.astype(jnp.float32)
    partner = jnp.roll(wide, x.shape[-1] // 2, axis=-1)
    return (wide * cos + partner * sin).astype(x.dtype)
