# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements quantized_matmul without a kernel: exact products of few bits, then scales, per block.

    out = sum over blocks b of (values of x in b @ values of w in b) * x's scales of b * w's of b

    int8, int4       as int8 (XLA does not multiply pairs of int4), summed in int32: exact
    float8           as bfloat16, which holds every value, summed in float32
    floating x       the values of w in the dtype of x, summed in float32

Where block sizes differ, the blocks here are common parts of both. A loop adds them one by one to
one float32 sum; side by side they would need memory for as many results. Where scaling first loses
nothing, it is done first, in one product: w for a float32 x, and mxfp8, whose scales are powers of
two.

It runs everywhere and is tuned on the CPU: on two cores with AVX512-VNNI, 1024 x 1024 x 1024 takes
about two thirds of the time of float32 by channel, and as long as float32 in blocks of 128.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Shaped
from pallas_kernels.quantized_array import QuantizedArray, dequantize


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray, w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m n"]:
    """Return what `pallas_kernels.quantized_matmul` returns."""
    dtype = multiplied_dtype(x, w)
    x, w = (_with_scales_inside(factor, dtype) for factor in (x, w))
    blocks = math.lcm(*(_num_blocks(factor) for factor in (x, w)))
    x_values = _values(x, dtype)
    w_values = _values(w, dtype)
    x_scales = _scales(x, -1, blocks)
    w_scales = _scales(w, -2, blocks)
    if blocks == 1:
        return (_dot(x_values, w_values) * x_scales * w_scales).astype(out_dtype)

    def add_block(total: Array, block: tuple[Array, ...]) -> tuple[Array, None]:
        x_block, w_block, x_scale, w_scale = block
        return total + _dot(x_block, w_block) * x_scale * w_scale, None

    by_block = (
        jnp.moveaxis(x_values.reshape(x.shape[0], blocks, -1), 1, 0),
        w_values.reshape(blocks, -1, w.shape[1]),
        jnp.moveaxis(x_scales.reshape(-1, blocks, 1), 1, 0),
        w_scales.reshape(blocks, 1, -1),
    )
    total = jnp.zeros_like(_dot(*(part[0] for part in by_block[:2])))
    return jax.lax.scan(add_block, total, by_block)[0].astype(out_dtype)


def times_transposed(
    x: Float[Array, "m n"], w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m k"]:
    """Return x @ w^T, the gradient of the rows.

    The scales of a quantised w vary along the sum, so that w is dequantised to the dtype of x.
    """
    matrix = dequantize(w, x.dtype) if isinstance(w, QuantizedArray) else w
    dims = (((1,), (1,)), ((), ()))
    out = jax.lax.dot_general(x, matrix, dims, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def multiplied_dtype(x: Array | QuantizedArray, w: Array | QuantizedArray) -> Any:
    """Return the dtype in which the values of two factors are multiplied."""
    if not isinstance(x, QuantizedArray):
        return x.dtype
    if not isinstance(w, QuantizedArray):
        return w.dtype
    return jnp.int8 if jnp.issubdtype(x.values.dtype, jnp.integer) else jnp.bfloat16


def _with_scales_inside(factor: Array | QuantizedArray, dtype: Any) -> Array | QuantizedArray:
    """Return the factor dequantised, where that rounds no more than float32 does."""
    if not isinstance(factor, QuantizedArray) or factor.num_blocks == 1:
        return factor
    is_exact = factor.scales.dtype == jnp.float8_e8m0fnu and dtype == jnp.bfloat16
    return dequantize(factor, dtype) if is_exact or dtype == jnp.float32 else factor


def _num_blocks(factor: Array | QuantizedArray) -> int:
    return factor.num_blocks if isinstance(factor, QuantizedArray) else 1


def _values(factor: Array | QuantizedArray, dtype: Any) -> Shaped[Array, "_ _"]:
    values = factor.values if isinstance(factor, QuantizedArray) else factor
    return values.astype(dtype)


def _scales(factor: Array | QuantizedArray, axis: int, blocks: int) -> Float[Array, "_ _"]:
    """Return the scales in float32, `blocks` of them along the axis."""
    if not isinstance(factor, QuantizedArray):
        shape = [1, 1]
        shape[axis] = blocks
        return jnp.ones(shape, jnp.float32)
    scales = factor.scales.astype(jnp.float32)
    return jnp.repeat(scales, blocks // scales.shape[axis], axis)


def _dot(x: Shaped[Array, "m k"], w: Shaped[Array, "k n"]) -> Float[Array, "m n"]:
    total = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.matmul(x, w, preferred_element_type=total).astype(jnp.float32)
