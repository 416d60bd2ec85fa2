# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines how the halves of a layer read the residual stream and write to it."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True, slots=True)
class PlainResidual:
    """The residual connection x + m y."""

    def read(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """Return the input of a half: the stream itself."""
        return x

    def write(
        self, x: Float[Array, "B S D"], y: Float[Array, "B S D"], multiplier: float
    ) -> Float[Array, "B S D"]:
        """Return the stream after a half.

        Args:
            x: Residual stream before the half.
            y: Output of the half.
            multiplier: m, factor of the output.
        """
        return x + jnp.asarray(multiplier, x.dtype) * y.astype(x.dtype)
