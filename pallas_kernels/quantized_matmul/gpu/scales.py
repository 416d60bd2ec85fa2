# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Two factors as the GPU kernels of quantized_matmul want them: values, and scales of two kinds.

    x @ w = (sum over blocks b of (x_b @ w_b) * x_blocks [b m] * w_blocks [b n]) * ends

Scales that hold for all of k come in at the end; the others stand in tables of one row per block,
the same blocks for both factors.

To add a kind of scale: here, and in the kernels.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.quantized_array import QuantizedArray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Factors of a product, their sizes filled up or not."""

    x: Array
    """[m k], values alone."""
    w: Array
    """[k n], values alone."""
    x_blocks: Array | None
    """[blocks m] float32."""
    w_blocks: Array | None
    """[blocks n] float32."""
    x_end: Array | None
    """[m 1] or [1 1] float32."""
    w_end: Array | None
    """[1 n] or [1 1] float32."""
    block: int | None
    """Of k."""
    is_floating: bool
    """x is no quantised array."""

    @classmethod
    def of(cls, x: Any, w: QuantizedArray, block: int | None) -> "Scaled":
        """From what a caller gives, with blocks of both that `block` divides."""
        x_blocks = w_blocks = x_end = None
        if isinstance(x, QuantizedArray):
            x_blocks, x_end = _table(x, block, x.scales.T), _end(x)
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
        """The scales that hold for all of k, as one per row [m] and one per column [n]; 1 where
        there are none, and where sizes were filled up."""

        def vector(end: Array | None, size: int) -> Array:
            if end is None:
                return jnp.ones(size, jnp.float32)
            if end.size == 1:
                return jnp.broadcast_to(end.reshape(1), size)
            return jnp.pad(end.reshape(-1), (0, size - end.size), constant_values=1.0)

        return vector(self.x_end, self.x.shape[0]), vector(self.w_end, self.w.shape[1])

    def finish(self, out: Array) -> Array:
        """[m n] float32 with the scales that hold for all of k."""
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


def filled(factors: Scaled, *, m: int = 1, k: int = 1, n: int = 1) -> Scaled:
    """With sizes in whole tiles: zeros, and scales of 1."""
    more_m, more_n = -factors.x.shape[0] % m, -factors.w.shape[1] % n
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
    """With zeros below and to the right."""
    if x is None or not (rows or columns):
        return x
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, rows, 0), (0, columns, 0)))
