# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Decides where the scales of quantised factors enter the products of the TPU kernels.

    end      out = scale of the row * scale of the column * sums     scales do not vary in the sum
    chunks   out = sum over blocks of the same, per block            both factors quantised
    tile     the matrix becomes floating in its tile, once per group

`end` is exact for integers up to its last multiplication: the sums are int32. `chunks` needs blocks
of a multiple of 32 along the sum. All else is `tile`, where quantised rows become floating before
the kernel: bfloat16 for mxfp8, exactly, because its scales are powers of two; float32, and its six
passes, for other small blocks, and for products with transposed matrices whose scales vary along
the sum.

Floating rows meet a matrix in their own dtype: bfloat16 holds every value of 8 and 4 bits. One
scale for everything counts as one per column.
"""

import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.grouped_matmul.tpu.blocks import multiplies
from pallas_kernels.quantized_array import QuantizedArray, constant

SUBLANES = 8
CHUNK = 32


class Factors(NamedTuple):
    """Rows and matrices as a kernel takes them."""

    rows: Array
    """[p R s], in parts."""
    weights: Array
    """[G q k n], in parts."""
    mode: Literal["none", "end", "chunks", "tile"]
    dtypes: tuple[Any, Any]
    """Dtypes in which tiles of rows and of matrices are multiplied."""
    row_scales: Float[Array, "R c"] | None = None
    """c = 1 for `end`; one per block for `chunks`."""
    weight_scales: Float[Array, "G q c o"] | None = None
    """c = 1 for `end`, per column of the result; else one per block and column of weights."""
    more: tuple[Array, ...] = ()
    """Further parts of the weights, [G 1 k n] each, in arrays of their own."""

    @property
    def parts(self) -> int:
        """Parts of the weights."""
        return self.weights.shape[1] + len(self.more)


def factors_of(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray | tuple[Array, ...],
    *,
    is_turned: bool,
) -> Factors:
    """Return the factors, with the place where scales enter.

    Args:
        rows: [p R k], transposed [p R n]; quantised: [R k] or [R n].
        weights: [G q k n], with scales along k or one scale; or floating parts [G 1 k n].
        is_turned: Whether the sum runs over n.

    Raises:
        ValueError: A block size cannot be unpacked.
    """
    if isinstance(weights, tuple):
        first, *more = weights
        return factors_of(rows, first, is_turned=is_turned)._replace(more=tuple(more))
    if not isinstance(weights, QuantizedArray):
        wide = constant(rows).astype(weights.dtype)
        return Factors(_in_parts(wide), weights, "none", (wide.dtype, weights.dtype))
    varies = weights.axis is not None and (weights.num_blocks > 1 or is_turned)
    if not isinstance(rows, QuantizedArray):
        # Parts that share one sum cannot be scaled at the end.
        mode = "tile" if varies or rows.ndim == 3 and rows.shape[0] > 1 else "end"
        return _floating(rows, weights, mode, is_turned=is_turned)
    values = rows.values
    scales = rows.scales.astype(jnp.float32)
    dtypes = dtypes_of(values.dtype, weights.values.dtype)
    if rows.num_blocks == 1 and not varies:
        columns = _columns(weights, 2 if is_turned else 3).astype(jnp.float32)
        if rows.axis is None:
            columns = columns * scales.reshape(1, 1, 1, 1)
            scales = None
        return Factors(_in_parts(values), weights.values, "end", dtypes, scales, columns)
    powers = _are_powers(rows) and _are_powers(weights)
    chunk = math.gcd(*(x.shape[-1 if x is rows else -2] // x.num_blocks for x in (rows, weights)))
    if not is_turned and not powers and chunk % CHUNK == 0:
        number = values.shape[1] // chunk
        columns = _columns(weights, 3).astype(jnp.float32)
        columns = jnp.repeat(columns, number // columns.shape[2], axis=2)
        scales = jnp.repeat(scales, number // scales.shape[1], axis=1)
        scales = jnp.broadcast_to(scales, (values.shape[0], number))
        return Factors(_in_parts(values), weights.values, "chunks", dtypes, scales, columns)
    wide = constant(rows).astype(jnp.bfloat16 if powers else jnp.float32)
    return _floating(wide, weights, "tile", is_turned=is_turned)


def dtypes_of(rows: Any, weights: Any) -> tuple[Any, Any]:
    """Return the dtypes of the product: unchanged where the matrix unit takes the pair.

    Args:
        rows: Dtype of the rows.
        weights: Dtype of the matrices.
    """
    if multiplies(rows.name, weights.name):
        return rows, weights
    is_integer = jnp.issubdtype(rows, jnp.integer)
    wide = jnp.dtype(jnp.int8 if is_integer else jnp.bfloat16)
    return wide, wide


def _floating(
    rows: Array, weights: QuantizedArray, mode: Literal["end", "tile"], *, is_turned: bool
) -> Factors:
    if mode == "tile":
        _check(weights)
    columns = _columns(weights, 2 if is_turned and mode == "end" else 3)
    return Factors(_in_parts(rows), weights.values, mode, (rows.dtype, rows.dtype), None, columns)


def _in_parts(rows: Array) -> Array:
    return rows if rows.ndim == 3 else rows[None]


def _are_powers(x: QuantizedArray) -> bool:
    return x.scales.dtype == jnp.float8_e8m0fnu


def _columns(weights: QuantizedArray, axis: int) -> Float[Array, "G q c o"]:
    """Return scales of every index along an axis; powers of two as bfloat16."""
    groups, parts = weights.shape[:2]
    scales = weights.scales.astype(jnp.bfloat16 if _are_powers(weights) else jnp.float32)
    return jnp.broadcast_to(scales, (groups, parts, scales.shape[2], weights.shape[axis]))


def _check(weights: QuantizedArray) -> None:
    size = weights.block_size
    if size is not None and size % SUBLANES:
        raise ValueError(
            f"grouped_matmul: blocks of {size} values along the contracted axis of weights must be "
            f"multiples of {SUBLANES} for pallas_tpu: quantize with block_size="
            f"{-(-size // SUBLANES) * SUBLANES}, or with one scale per channel."
        )
