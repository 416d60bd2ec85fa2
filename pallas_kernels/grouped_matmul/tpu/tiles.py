# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of one tile of a grouped product, in values.

Products of float32 take the exact passes of the matrix unit, those of bfloat16 and float8 its
native one, and add up in float32; those of integers add up in int32. A matrix unit without integers
(TPU v7) takes them in bfloat16, which has all of int8, and is exact in float32 for sums of up to
1040 products of 127 * 127: longer ones are cut.

Nothing here knows of a grid or of groups.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.grouped_matmul.tpu.blocks import multiplies

EXACT = 1024
"""Products of integers that add up in float32 without rounding."""


def dot(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    """A product that adds up in float32, or int32 for integers.

    Args:
        a: matrix.
        b: matrix.
        contracted: which dimension of each.
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
    """Values of few bits in another dtype, after multiplication by the scale of their block.

    Args:
        values: [k n]
        scales: of c blocks along k; None: left out.
        dtype: of the result, floating unless scales are left out.
    """
    if scales is None:
        # Integers of 4 and 8 bits, and float8, have their places in each of these dtypes.
        return values.astype(dtype)
    blocks, (k, n) = scales.shape[0], values.shape
    wide, scales = values.astype(jnp.float32), scales.astype(jnp.float32)
    if blocks == 1:
        return (wide * scales).astype(dtype)
    wide = wide.reshape(blocks, k // blocks, n) * scales[:, None, :]
    return wide.reshape(k, n).astype(dtype)


def _dot_of_integers(a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    (left,), (right,) = contracted
    total = None
    for start in range(0, a.shape[left], EXACT):
        end = min(start + EXACT, a.shape[left])
        x = jax.lax.slice_in_dim(a, start, end, axis=left).astype(jnp.bfloat16)
        y = jax.lax.slice_in_dim(b, start, end, axis=right).astype(jnp.bfloat16)
        piece = dot(x, y, contracted).astype(jnp.int32)
        total = piece if total is None else total + piece
    assert total is not None
    return total
