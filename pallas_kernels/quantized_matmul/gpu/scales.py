# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares two factors for the GPU kernels of quantized_matmul: values, and scales of two kinds.

    x @ w = (sum over blocks b of (x_b @ w_b) * x_blocks [b m] * w_blocks [b n]) * ends

Scales that hold for all of k enter at the end; the others are tables of one row per block, with the
same blocks for both factors.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.quantized_array import QuantizedArray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Factors of a product, padded or not."""

    x: Array
    """Values [m k]."""
    w: Array
    """Values [k n]."""
    x_blocks: Array | None
    """Scales [blocks m] float32."""
    w_blocks: Array | None
    """Scales [blocks n] float32."""
    x_end: Array | None
    """Scales [m 1] or [1 1] float32."""
    w_end: Array | None
    """Scales [1 n] or [1 1] float32."""
    block: int | None
    """Length of a block of k."""
    is_floating: bool
    """Whether x is not quantised."""

    @classmethod
    def of(cls, x: Any, w: QuantizedArray, block: int | None) -> "Scaled":
        """Return the factors of a call, with blocks of both that `block` divides."""
        x_blocks = w_blocks = x_end = None
        if isinstance(x, QuantizedArray):
            x_blocks = _table(x, block, x.scales.T)
            x_end = _end(x)
        w_end = _end(w)
        w_blocks = _table(w, block, w.scales)
        return cls(
            x=x.values if isinstance(x, QuantizedArray) else x,
            w=w.values,
            x_blocks=x_blocks,
            w_blocks=w_blocks,
            x_end=x_end,
            w_end=w_end,
            block=block,
            is_floating=not isinstance(x, QuantizedArray),
        )

    def ends(self) -> tuple[Array, Array]:
        """Return the scales that hold for all of k, per row [m] and per column [n].

        They are 1 where there are none, and in padding.
        """

        def vector(end: Array | None, size: int) -> Array:
            if end is None:
                return jnp.ones(size, jnp.float32)
            if end.size == 1:
                return jnp.broadcast_to(end.reshape(1), size)
            return jnp.pad(end.reshape(-1), (0, size - end.size), constant_values=1.0)

        return vector(self.x_end, self.x.shape[0]), vector(self.w_end, self.w.shape[1])

    def finish(self, out: Array) -> Array:
        """Apply the scales that hold for all of k to [m n] float32."""
        for end in (self.x_end, self.w_end):
            if end is not None:
                out = out * end
        return out


def _table(x: QuantizedArray, block: int | None, scales: Array) -> Array | None:
    if x.block_size is None or block is None:
        return None
    return jnp.repeat(scales.astype(jnp.float32), x.block_size // block, axis=0)


def _end(x: QuantizedArray) -> Array | None:
    return x.scales.astype(jnp.float32) if x.block_size is None else None


def fill_tiles(factors: Scaled, *, m: int = 1, k: int = 1, n: int = 1) -> Scaled:
    """Pad sizes to whole tiles, with zeros and scales of 1."""
    more_m = -factors.x.shape[0] % m
    more_n = -factors.w.shape[1] % n
    more_k = -factors.x.shape[1] % k
    if not (more_m or more_n or more_k):
        return factors
    return dataclasses.replace(
        factors,
        x=pad(factors.x, more_m, more_k),
        w=pad(factors.w, more_k, more_n),
        x_blocks=pad(factors.x_blocks, 0, more_m),
        w_blocks=pad(factors.w_blocks, 0, more_n),
    )


def pad(x: Array | None, rows: int, columns: int) -> Any:
    """Pad with zeros below and to the right."""
    if x is None or not (rows or columns):
        return x
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, rows, 0), (0, columns, 0)))
