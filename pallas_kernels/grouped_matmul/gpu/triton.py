# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_matmul in Triton, for any NVIDIA GPU with tensor cores.

    multiply    a program per tile of rows of one group (schedule.py) and of columns, which writes
                only the tile's own rows. There are as many programs as there may be tiles; those
                without a tile end at once
    contract    a program per tile of a group's matrix; the rows of the group pass

Integers are multiplied in 8 bits and summed in int32, exactly. Weights of 8 bits become floating
beside the tensor cores, where rows are floating. Scales enter after the sum of their block. What
Triton or older GPUs cannot read is widened before: int4 to int8, float8 to bfloat16, both exactly.
Float32 is multiplied as such, not as TF32. Sizes are padded to whole tiles, with zeros.

It does not run on TPUs, and on the CPU only interpreted (`interpret=True`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.array_types import Array, Int
from pallas_kernels.gpu.hopper_parts import fill_zeros, sum_dtype
from pallas_kernels.grouped_matmul.gpu.operands import Operands, operands_of, without_scales
from pallas_kernels.grouped_matmul.gpu.schedule import row_tiles, spans_of
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.quantized_array import QuantizedArray


class _ProductBlocks(NamedTuple):
    """Rows and columns of a tile, and the length of the sum per step."""

    rows: int
    columns: int
    depth: int


def _block_sizes(itemsize: int) -> _ProductBlocks:
    """Return tiles that fit the 99 KiB of the smaller GPUs, by the bytes of an element."""
    if itemsize == 4:
        # Exact float32 products use no tensor core and are unrolled: only small tiles compile.
        return _ProductBlocks(64, 64, 32)
    return _ProductBlocks(128, 128, 64 // itemsize)


def _dot(x: Array, y: Array, axis_x: int, axis_y: int) -> Array:
    return jax.lax.dot_general(
        x,
        y,
        (((axis_x,), (axis_y,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=sum_dtype(x.dtype),
    )


def _multiply_kernel(
    tiles_ref, count_ref, rows_ref, weights_ref, *refs, blocks, parts, is_turned, num_groups
):
    *scale_refs, out_ref = refs
    at = pl.program_id(0)
    columns = pl.ds(pl.program_id(1) * blocks.columns, blocks.columns)

    @pl.when(at < count_ref[0])
    def _tile() -> None:
        group, first, low, high = (tiles_ref[at, i] for i in range(4))
        rows = pl.ds(first, blocks.rows)
        own_steps = rows_ref.shape[1] // (parts * blocks.depth)
        zeros = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)

        def product(part: Array) -> Array:
            def step(i: Array, total: Array) -> Array:
                inner = pl.ds((part * own_steps + i) * blocks.depth, blocks.depth)
                x = rows_ref[rows, inner]
                w = weights_ref[group, *((columns, inner) if is_turned else (inner, columns))]
                return total + _dot(x, w.astype(x.dtype), 1, int(is_turned))

            start = zeros.astype(sum_dtype(rows_ref.dtype))
            return jax.lax.fori_loop(0, own_steps, step, start)

        def add(part: Array, sums: Array) -> Array:
            out = product(part).astype(jnp.float32)
            row_scales_ref, weight_scales_ref = scale_refs
            out = out * row_scales_ref[part, rows][:, None]
            return sums + out * weight_scales_ref[group, part, columns][None, :]

        # Rows past the last group have no sum: neither values nor scales are read.
        sums = jnp.where(group < num_groups, jnp.int32(parts), jnp.int32(0))
        if scale_refs:
            out = jax.lax.fori_loop(0, sums, add, zeros)
        else:
            out = jax.lax.fori_loop(0, sums, lambda part, _: product(part), zeros)
        index = jax.lax.broadcasted_iota(jnp.int32, out.shape, 0)
        is_own = (index >= low) & (index < high)
        plgpu.store(out_ref.at[rows, columns], out.astype(out_ref.dtype), mask=is_own)


def multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
    interpret: bool = False,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    factors = _readable(operands_of(rows, weights, is_turned=is_turned))
    blocks = _block_sizes(factors.rows.dtype.itemsize)
    depth = blocks.depth
    if factors.blocks > 1:
        while factors.block_size % depth:
            depth //= 2
        if depth < 16:  # smallest sum of a tensor core
            factors = without_scales(rows, weights)
            depth = blocks.depth
    blocks = blocks._replace(depth=depth)
    return _multiply(factors, group_sizes, blocks, is_turned, out_dtype, interpret)


def _multiply(
    factors: Operands,
    group_sizes: Array,
    blocks: _ProductBlocks,
    is_turned: bool,
    out_dtype: Any,
    interpret: bool,
) -> Array:
    num_rows = factors.rows.shape[0]
    width = factors.weights.shape[1 if is_turned else 2]
    rows = _filled_rows(factors.rows, blocks.rows, blocks.depth)
    inner, outer = (blocks.columns, blocks.depth) if is_turned else (blocks.depth, blocks.columns)
    weights = fill_zeros(factors.weights, 1, inner, outer)
    wide = weights.shape[1 if is_turned else 2]
    scales = ()
    if factors.row_scales is not None and factors.weight_scales is not None:
        scales = (
            _filled_rows(factors.row_scales, blocks.rows, 1).T,
            fill_zeros(factors.weight_scales, 1, 1, blocks.columns),
        )
    listed = row_tiles(rows.shape[0], group_sizes, blocks.rows)
    out = pl.pallas_call(
        functools.partial(
            _multiply_kernel,
            blocks=blocks,
            parts=max(1, factors.blocks),
            is_turned=is_turned,
            num_groups=weights.shape[0],
        ),
        grid=(listed.tiles.shape[0], wide // blocks.columns),
        out_shape=shape_varying_like((rows.shape[0], wide), out_dtype, rows, weights, group_sizes),
        compiler_params=_COMPILER,
        interpret=interpret,
        name="grouped_matmul",
    )(*listed, rows, weights, *scales)
    return out[:num_rows, :width]


def _contract_kernel(starts_ref, ends_ref, rows_ref, others_ref, out_ref, *, blocks):
    group = pl.program_id(0)
    start = starts_ref[group]
    end = ends_ref[group]
    lhs = pl.ds(pl.program_id(1) * blocks.rows, blocks.rows)
    rhs = pl.ds(pl.program_id(2) * blocks.columns, blocks.columns)
    depth = blocks.depth

    def step(i: Array, total: Array) -> Array:
        begin = start + i * depth
        first = jnp.minimum(begin, rows_ref.shape[0] - depth)
        row_slice = pl.ds(first, depth)

        def read(ref: Any, columns: Any) -> Array:
            # Both factors are masked: rows of other groups may be NaN.
            x = ref[row_slice, columns]
            index = first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            return jnp.where((index >= begin) & (index < end), x, jnp.zeros_like(x))

        return total + _dot(read(rows_ref, lhs), read(others_ref, rhs), 0, 0)

    zeros = jnp.zeros((blocks.rows, blocks.columns), sum_dtype(rows_ref.dtype))
    out = jax.lax.fori_loop(0, pl.cdiv(end - start, depth), step, zeros)
    out_ref[group, lhs, rhs] = out.astype(out_ref.dtype)


def contract(
    rows: Array | QuantizedArray,
    other_rows: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
    interpret: bool = False,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    factors = _readable(operands_of(rows, other_rows, is_turned=False))
    x = factors.rows
    y = factors.weights
    y = y.astype(x.dtype)
    height = x.shape[1]
    width = y.shape[1]
    blocks = _block_sizes(x.dtype.itemsize)
    starts, ends = spans_of(x.shape[0], group_sizes)
    x = _filled_rows(x, blocks.depth, blocks.rows)
    y = _filled_rows(y, blocks.depth, blocks.columns)
    shape = group_sizes.shape[0], x.shape[1], y.shape[1]
    is_scaled = factors.row_scales is not None
    stored = jnp.float32 if is_scaled else out_dtype
    out = pl.pallas_call(
        functools.partial(_contract_kernel, blocks=blocks),
        grid=(shape[0], shape[1] // blocks.rows, shape[2] // blocks.columns),
        out_shape=shape_varying_like(shape, stored, x, y, group_sizes),
        compiler_params=_COMPILER,
        interpret=interpret,
        name="grouped_outer",
    )(starts, ends, x, y)[:, :height, :width]
    return factors.scaled_product(out, group_sizes).astype(out_dtype) if is_scaled else out


def _readable(factors: Operands) -> Operands:
    """Return int4 as int8, float8 as bfloat16 or as the rows, which Triton reads on every GPU."""
    rows = factors.rows
    weights = factors.weights
    if not (rows.dtype.itemsize == 1 and jnp.issubdtype(rows.dtype, jnp.floating)):
        if weights.dtype == jnp.int4:
            weights = weights.astype(jnp.int8)
        elif weights.dtype.itemsize == 1 and jnp.issubdtype(weights.dtype, jnp.floating):
            weights = weights.astype(rows.dtype)
        return dataclasses.replace(factors, weights=weights)
    return factors.widen()


# Eight warps for tiles of 128 by 128; copies in flight.
_COMPILER = plgpu.CompilerParams(num_warps=8, num_stages=3)


def _filled_rows(x: Array, least: int, multiple: int) -> Array:
    """Pad rows [R d] to at least as many rows, and d to a multiple."""
    x = fill_zeros(x, 1, multiple)
    return jnp.pad(x, [(0, least - x.shape[0]), (0, 0)]) if x.shape[0] < least else x


PRODUCTS = Products(multiply=multiply, contract=contract)
