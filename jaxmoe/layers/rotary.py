# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE, arXiv 2104.09864): pairs of features turn with the position.

Feature h of the first half is paired with feature h + H/2 of the second (the layout of Hugging
Face checkpoints), and turns by position * theta^(-2h/H). Angles are computed in f32.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotate(
    x: Float[Array, "B S N H"], positions: Int[Array, "#B S"], theta: float
) -> Float[Array, "B S N H"]:
    """Turns queries or keys by their positions.

    Args:
        x: heads; H is even.
        positions: B may be 1, for positions shared by all rows.
        theta: base of the wavelengths.

    Returns:
        In the dtype of `x`.
    """
    half = x.shape[-1] // 2
    exponents = jnp.arange(half, dtype=jnp.float32) / half
    frequencies = jnp.float32(theta) ** -exponents
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
