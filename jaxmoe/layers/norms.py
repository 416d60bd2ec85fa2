# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""RMSNorm: y = gain * x / sqrt(mean(x^2) + epsilon), in f32 (arXiv 1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jaxmoe.declarations import Declaration, declare
from sharding import axes as ax


def rms_norm(
    x: Float[Array, "*B D"], gain: Float[Array, " D"], epsilon: float
) -> Float[Array, "*B D"]:
    """Normalise the last dimension to RMS 1, times the gain, in the dtype of `x`.

    Args:
        x: Array of any float dtype.
        gain: Factor of each feature.
        epsilon: Term added to the mean square.
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + epsilon)
    gain = gain.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + gain.shape)
    return (normed * gain).astype(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension with a learned gain, initially 1."""

    dim: int
    epsilon: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Return `x` normalised."""
        gains = Declaration(
            shape=(self.dim,), axes=(ax.NORM,), role="norm", matrix=None, init="ones"
        )
        return rms_norm(x, declare(self, "gain", gains), self.epsilon)
