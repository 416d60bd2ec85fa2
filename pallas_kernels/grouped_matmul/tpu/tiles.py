# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes one tile of a grouped product on values.

Products of float32 take the exact passes of the matrix unit, those of bfloat16 and float8 its
native one, with sums in float32; integers are summed in int32. A matrix unit without integers (TPU
v7) takes them in bfloat16, which holds all of int8; its float32 sums are exact for up to 1040
products of 127 * 127, and longer ones are cut.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.grouped_matmul.tpu.blocks import multiplies

EXACT = 1024
"""Products of integers that float32 sums without rounding."""


def dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    """Return a product with sums in float32, or int32 for integers.

    Args:
        a: Matrix.
        b: Matrix.
        contracted: Contracted dimension of each.
    """
    if jnp.issubdtype(a.dtype, jnp.integer):
        if a.dtype == jnp.int8 and not multiplies("int8", "int8"):
            return _dot_of_integers(a, b, contracted)
        return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.int32)
    is_wide = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (contracted, ((), ())),
        precision=jax.lax.Precision.HIGHEST if is_wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def times_scales(values: Array, scales: Float[Array, "c n"] | None, dtype: Any) -> Array:
    """Return values of few bits in another dtype, times the scale of their block.

    Args:
        values: [k n].
        scales: Scales of c blocks along k; None for none.
        dtype: Dtype of the result, floating unless there are no scales.
    """
    if scales is None:
        # Each of these dtypes holds integers of 4 and 8 bits, and float8.
        return values.astype(dtype)
    blocks, (k, n) = scales.shape[0], values.shape
    wide = values.astype(jnp.float32)
    scales = scales.astype(jnp.float32)
    if blocks == 1:
        return (wide * scales).astype(dtype)
    wide = wide.reshape(blocks, k // blocks, n) * scales[:, None, :]
    return wide.reshape(k, n).astype(dtype)


def _dot_of_integers(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    (lhs,), (rhs,) = contracted
    total = None
    for start in range(0, a.shape[lhs], EXACT):
        end = min(start + EXACT, a.shape[lhs])
        x = jax.lax.slice_in_dim(a, start, end, axis=lhs).astype(jnp.bfloat16)
        y = jax.lax.slice_in_dim(b, start, end, axis=rhs).astype(jnp.bfloat16)
        piece = dot(x, y, contracted).astype(jnp.int32)
        total = piece if total is None else total + piece
    assert total is not None
    return total
