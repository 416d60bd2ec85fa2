# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements quantized_matmul for TPUs: Mosaic kernels that apply scales in the memory of the core.

    out = sum over blocks b of k of (x_b @ w_b) * x scales [m b] * w scales [b n]

The grid is (tile of m, tile of n, tile of k): sums stay in VMEM over the tiles of k. Memory is read
in few bits, and converted to what the MXU multiplies one tile at a time (layout.py has the dtypes).
Integers are summed exactly in int32, over all of k where no side has blocks, else within a block;
everything else is summed in float32. Scales that hold for all of k are applied once, at the end.

The first blocks of k of a MixedArray (mixed_array.py) are multiplied in 8 bits and the others in 4,
into the same sums: two runs of one loop. Where the MXU has no integers both are in bfloat16.

The gradient of a floating x has its own kernel, which transposes w tile by tile:

    d x = d out @ (values * scales)^T        the second factor rounded to the dtype of x

Scale blocks of 32 and 64 (mxfp8) take the MXU as much time as blocks of 128, so four and two times
as much in all: for few rows, where reading w takes the time, that is hidden.

Call it on local arrays, in a `jax.shard_map`: an array sharded by the compiler is gathered first.
On the CPU it runs in TPU interpret mode only (`pallas_kernels.interpreter.interpret_kernels`).
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float
from pallas_kernels.backend import device_kind
from pallas_kernels.flash_attention.tpu.tiles import column
from pallas_kernels.jax_versions import match_varying, shape_varying_like
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_matmul.mixed_array import MixedArray
from pallas_kernels.quantized_matmul.tpu.layout import (
    EXACT,
    LANES,
    FactorLayout,
    fill,
    lay_out,
)


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray, w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m n"]:
    """Return what `pallas_kernels.quantized_matmul` returns."""
    if not isinstance(x, QuantizedArray) and not isinstance(w, QuantizedArray):
        # XLA's own product, and its gradients.
        precision = _precision(x.dtype)
        out = jnp.matmul(x, w, precision=precision, preferred_element_type=jnp.float32)
        return out.astype(out_dtype)
    assert isinstance(w, QuantizedArray)  # checked by the API
    w = jax.lax.stop_gradient(w)
    if 0 in (*x.shape, *w.shape):
        out = jnp.zeros((x.shape[0], w.shape[1]), out_dtype)
        return match_varying(out, x, w)
    if isinstance(x, QuantizedArray):
        return _multiply(jax.lax.stop_gradient(x), w, out_dtype)
    return _with_gradient(x, w, out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_gradient(x: Array, w: QuantizedArray, out_dtype: Any) -> Array:
    return _multiply(x, w, out_dtype)


def _forward(x, w, out_dtype):
    # Residuals are arrays: an empty one carries the dtype of x.
    return _multiply(x, w, out_dtype), (w, jnp.zeros((), x.dtype))


def _backward(out_dtype, residuals, d_out):
    del out_dtype
    w, like = residuals
    return _multiply_turned(d_out.astype(like.dtype), w), None


_with_gradient.defvjp(_forward, _backward)


def multiply_mixed(x: QuantizedArray, w: MixedArray, out_dtype: Any) -> Float[Array, "m n"]:
    """Return the product with a matrix of which some blocks meet 8 bits, the others 4.

    Args:
        x: Result of `round_activations` for w.
        w: Matrix.
        out_dtype: Dtype of the result.
    """
    x, w = jax.lax.stop_gradient((x, w))
    return _multiply(x, w.weights, out_dtype, num_wide=w.num_wide)


# The product.


def _multiply(x: Any, w: Any, out_dtype: Any, num_wide: int | None = None) -> Array:
    layout, lhs, rhs = lay_out(x, w, out_dtype, num_wide=num_wide)
    tm = layout.tile_m
    tk = layout.tile_k
    tn = layout.tile_n
    per_tile = tk // (layout.block or tk)
    specs = (
        pl.BlockSpec((tm, tk), lambda i, j, t: (i, t)),
        pl.BlockSpec((1, tm), lambda i, j, t: (0, i)),
        pl.BlockSpec((None, per_tile, tm), lambda i, j, t: (t, 0, i)),
        pl.BlockSpec((tk, tn), lambda i, j, t: (t, j)),
        pl.BlockSpec((1, tn), lambda i, j, t: (0, j)),
        pl.BlockSpec((None, per_tile, tn), lambda i, j, t: (t, 0, j)),
    )
    operands = (*lhs, *rhs)
    is_given = tuple(array is not None for array in operands)
    arrays = [array for array in operands if array is not None]
    in_specs = [spec for spec, is_present in zip(specs, is_given, strict=True) if is_present]
    sums = jnp.int32 if layout.is_integer and layout.block is None else jnp.float32
    out = pl.pallas_call(
        functools.partial(_kernel, layout=layout, is_given=is_given),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(pl.cdiv(layout.m, tm), pl.cdiv(layout.n, tn), layout.k // tk),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((tm, tn), lambda i, j, t: (i, j)),
            scratch_shapes=[pltpu.VMEM((tm, tn), sums)],
        ),
        out_shape=shape_varying_like((layout.m, layout.n), out_dtype, *arrays),
        compiler_params=_SEMANTICS,
        cost_estimate=_cost(layout, arrays, layout.m * layout.n * out_dtype.itemsize),
        name="quantized_matmul",
    )(*arrays)
    return out[: x.shape[0]]


def _kernel(*refs: Any, layout: FactorLayout, is_given: tuple[bool, ...]) -> None:
    *inputs, out, sums = refs
    operands = iter(inputs)
    x, x_ends, x_parts, w, w_ends, w_parts = (
        next(operands) if is_present else None for is_present in is_given
    )
    assert x is not None and w is not None
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    def add(narrow_from: int | None) -> None:
        total = sums[...]
        for block, lhs, rhs in _blocks(x[...], w[...], layout):
            is_narrow = narrow_from is not None and block >= narrow_from
            product = _dot(lhs, rhs, layout, is_narrow)
            if layout.block is not None:
                product = product.astype(jnp.float32)
                if x_parts is not None:
                    product = product * column(x_parts[block : block + 1, :])[:, :1]
                if w_parts is not None:
                    product = product * w_parts[block : block + 1, :]
            total = total + product
        sums[...] = total

    _in_runs(add, step, layout)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        result = sums[...].astype(jnp.float32)
        if x_ends is not None:
            result = result * column(x_ends[...])[:, :1]
        if w_ends is not None:
            result = result * w_ends[...]
        out[...] = result.astype(out.dtype)


def _in_runs(add: Callable[[int | None], None], step: Any, layout: FactorLayout) -> None:
    """Add the tile of a step: of wide blocks, of narrow ones, or of both."""
    if layout.narrow_from is None:
        add(None)
        return
    num_tiles, remainder = divmod(
        layout.narrow_from, layout.tile_k // (layout.block or layout.tile_k)
    )
    if num_tiles:
        pl.when(step < num_tiles)(lambda: add(None))
    if remainder:
        pl.when(step == num_tiles)(lambda: add(remainder))
    pl.when(step >= num_tiles + (remainder > 0))(lambda: add(0))


def _blocks(x: Array, w: Array, layout: FactorLayout) -> Iterator[tuple[int, Array, Array]]:
    """Return the pieces of a tile that add up without scales between them, with their scale blocks.

    Blocks narrower than a register are cut out of x by zeros, and meet all rows of w beside them.
    """
    block = layout.block or layout.tile_k
    for start in range(0, layout.tile_k, max(block, LANES)):
        piece = slice(start, start + max(block, LANES))
        lhs = x[:, piece]
        rhs = w[piece, :]
        if block >= LANES:
            yield start // block, lhs, rhs
            continue
        wide = lhs.astype(jnp.int32 if layout.multiplied == jnp.int8 else jnp.float32)
        lane = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 1)
        for i in range(LANES // block):
            is_inside = (lane >= i * block) & (lane < (i + 1) * block)
            rows = jnp.where(is_inside, wide, jnp.zeros_like(wide))
            yield start // block + i, rows.astype(lhs.dtype), rhs


def _dot(x: Array, w: Array, layout: FactorLayout, is_narrow: bool = False) -> Array:
    """Return x @ w of a piece, in int32 for integers and float32 for others."""
    dtype = layout.multiplied
    if is_narrow:
        x = x.astype(jnp.int4)
        # The CPU, which interprets the TPU kernel, does not multiply int4.
        dtype = jnp.int8 if device_kind() == "cpu" else jnp.int4
    if layout.is_integer and dtype == jnp.bfloat16:
        # Float32 sums integers exactly over so many products.
        pieces = [slice(start, start + EXACT) for start in range(0, x.shape[1], EXACT)]
        products = [_sum(x[:, p].astype(dtype), w[p, :].astype(dtype)) for p in pieces]
        return functools.reduce(jnp.add, [product.astype(jnp.int32) for product in products])
    if dtype is not None:
        x = x.astype(dtype)
        w = w.astype(dtype)
    return _sum(x, w)


def _sum(x: Array, w: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    sums = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(
        x, w, dims, precision=_precision(x.dtype), preferred_element_type=sums
    )


# The gradient.


def _multiply_turned(d_out: Array, w: QuantizedArray) -> Array:
    """Return d_out [m n] @ w [k n]^T."""
    (m, n), k = d_out.shape, w.shape[0]
    like = jax.ShapeDtypeStruct((m, k), d_out.dtype)
    layout, _, rhs = lay_out(like, w, d_out.dtype, is_turned=True)
    tm = layout.tile_m
    tk = layout.tile_k
    tn = layout.tile_n
    scales = rhs.ends if rhs.parts is None else rhs.parts
    assert scales is not None
    arrays = [fill(d_out, 0, layout.m), rhs.values, scales]
    scale_spec = pl.BlockSpec((1, tn), lambda i, t, j: (0, j))
    if rhs.parts is not None:
        scale_spec = pl.BlockSpec((None, scales.shape[1], tn), lambda i, t, j: (t, 0, j))
    out = pl.pallas_call(
        functools.partial(_turned_kernel, layout=layout),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=0,
            grid=(pl.cdiv(layout.m, tm), layout.k // tk, pl.cdiv(n, tn)),
            in_specs=[
                pl.BlockSpec((tm, tn), lambda i, t, j: (i, j)),
                pl.BlockSpec((tk, tn), lambda i, t, j: (t, j)),
                scale_spec,
            ],
            out_specs=pl.BlockSpec((tm, tk), lambda i, t, j: (i, t)),
            scratch_shapes=[pltpu.VMEM((tm, tk), jnp.float32)],
        ),
        out_shape=shape_varying_like((layout.m, layout.k), d_out.dtype, *arrays),
        compiler_params=_SEMANTICS,
        cost_estimate=_cost(layout, arrays, layout.m * layout.k * d_out.dtype.itemsize),
        name="quantized_matmul_d_rows",
    )(*arrays)
    return layout.drop_padding(out[:m], k)


def _turned_kernel(
    d_out: Any, w: Any, scales: Any, out: Any, sums: Any, *, layout: FactorLayout
) -> None:
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    size = layout.tile_k // scales.shape[0]
    rows = [
        w[b * size : (b + 1) * size, :].astype(jnp.float32) * scales[b : b + 1, :]
        for b in range(scales.shape[0])
    ]
    lhs = d_out[...].astype(jnp.float32)
    rhs = jnp.concatenate(rows, axis=0)
    if layout.n % layout.tile_n:
        # Values past the edge are undefined, and would be summed.
        lhs, rhs = (_within(a, layout.n - step * layout.tile_n) for a in (lhs, rhs))
    dtype = layout.multiplied
    sums[...] += _sum(lhs.astype(dtype), rhs.astype(dtype), (1, 1))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        out[...] = sums[...].astype(out.dtype)


def _within(a: Array, length: Array) -> Array:
    lane = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1)
    return jnp.where(lane < length, a, jnp.zeros_like(a))


_SEMANTICS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _precision(dtype: Any) -> jax.lax.Precision:
    """Return the precision that multiplies float32 exactly on the MXU."""
    is_wide = dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_wide else jax.lax.Precision.DEFAULT


def _cost(layout: FactorLayout, arrays: list[Array], out_bytes: int) -> pl.CostEstimate:
    """Return the cost for XLA's scheduler."""
    return pl.CostEstimate(
        flops=2 * layout.m * layout.k * layout.n,
        transcendentals=0,
        bytes_accessed=out_bytes + sum(array.size * array.dtype.itemsize for array in arrays),
    )
