# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements quantized_matmul in Triton, for any NVIDIA GPU with tensor cores.

A program writes a tile of out and runs through k. Memory is read in few bits; a tile of it becomes
what the tensor cores multiply:

    a floating x       the dtype of x; float32 as exact float32 products, not TF32
    two integers       int8, summed exactly in int32 over a block of scales, or over all of k
    two float8         bfloat16, which holds both kinds exactly

It covers what the Hopper kernels do not: float32, blocks of 32 (mxfp8), and other GPUs. There is no
kernel for few rows: k is not split. Before compute capability 8.9, which cannot read float8, XLA
makes bfloat16 of it first, a copy of twice the size.

Sizes are padded to whole tiles with zeros, which copies where they do not fit. On the CPU it runs
interpreted (`interpret=True`). JAX 0.11 deprecates Pallas through Triton.

To tune it: `_tiles` and `_COMPILER`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.array_types import Array
from pallas_kernels.jax_versions import shape_varying_like
from pallas_kernels.quantized_matmul.gpu.scales import Scaled, fill_tiles

SMALLEST_BLOCK = 32
"""Smallest block of scales along k: the int8 values that a tensor core takes at a time."""

_COMPILER = plgpu.CompilerParams(num_warps=4, num_stages=3)


class _TritonTiles(NamedTuple):
    m: int
    n: int
    k: int


def _tiles(m: int, dtype: Any, block: int | None) -> _TritonTiles:
    """Return tiles in powers of two; a block of scales holds whole steps of k."""
    rows = min(64, max(16, pl.next_power_of_2(m)))
    # Exact float32 products use no tensor core and are unrolled: only small tiles compile.
    columns, step = (64, 32) if dtype == jnp.float32 else (128, 64)
    return _TritonTiles(rows, columns, step if block is None else min(step, block & -block))


def multiply(
    factors: Scaled, *, has_float8: bool = True, out_dtype: Any, interpret: bool = False
) -> Array:
    """Return x @ w of a floating or quantised x and a quantised w.

    Args:
        factors: Factors of the product; blocks are multiples of `SMALLEST_BLOCK`.
        has_float8: Whether the GPU reads float8.
        out_dtype: Dtype of the result.
        interpret: Whether to run on the CPU.
    """
    m = factors.x.shape[0]
    n = factors.w.shape[1]
    is_integer = not factors.is_floating and jnp.issubdtype(factors.w.dtype, jnp.integer)
    narrow = jnp.int8 if is_integer else jnp.bfloat16
    dtype = jnp.dtype(factors.x.dtype if factors.is_floating else narrow)
    tiles = _tiles(m, dtype, factors.block)
    factors = fill_tiles(factors, m=tiles.m, n=tiles.n, k=tiles.k)
    x = factors.x
    w = factors.w
    if not has_float8:
        x, w = (_without_float8(a) for a in (x, w))
    ends = factors.ends()
    tables = (factors.x_blocks, factors.w_blocks)
    k = x.shape[1]
    arrays = (x, w, *ends, *(table for table in tables if table is not None))
    specs = [
        pl.BlockSpec((tiles.m, k), lambda i, j: (i, 0)),
        pl.BlockSpec((k, tiles.n), lambda i, j: (0, j)),
        pl.BlockSpec((tiles.m,), lambda i, j: (i,)),
        pl.BlockSpec((tiles.n,), lambda i, j: (j,)),
    ]
    if tables[0] is not None:
        specs.append(pl.BlockSpec((tables[0].shape[0], tiles.m), lambda i, j: (0, i)))
    if tables[1] is not None:
        specs.append(pl.BlockSpec((tables[1].shape[0], tiles.n), lambda i, j: (0, j)))
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            tiles=tiles,
            block=factors.block,
            has_x=tables[0] is not None,
            has_w=tables[1] is not None,
            dtype=dtype,
        ),
        out_shape=shape_varying_like((x.shape[0], w.shape[1]), out_dtype, *arrays),
        grid=(x.shape[0] // tiles.m, w.shape[1] // tiles.n),
        in_specs=specs,
        out_specs=pl.BlockSpec((tiles.m, tiles.n), lambda i, j: (i, j)),
        compiler_params=_COMPILER,
        interpret=interpret,
        name="quantized_matmul",
    )(*arrays)
    return out[:m, :n]


def _kernel(x_ref, w_ref, x_end_ref, w_end_ref, *refs, tiles, block, has_x, has_w, dtype):
    *tables, out_ref = refs
    x_scales_ref = tables[0] if has_x else None
    w_scales_ref = tables[-1] if has_w else None
    sums = jnp.int32 if dtype == jnp.int8 else jnp.float32
    shape = out_ref.shape
    k = x_ref.shape[1]

    def add(step: Any, total: Array) -> Array:
        part = pl.ds(step * tiles.k, tiles.k)
        x = _as(x_ref[:, part], dtype)
        w = _as(w_ref[part, :], dtype)
        return total + jax.lax.dot_general(
            x,
            w,
            (((1,), (0,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
            preferred_element_type=sums,
        )

    def add_block(index: Any, total: Array) -> Array:
        steps = block // tiles.k
        first = index * steps
        inner = jax.lax.fori_loop(first, first + steps, add, jnp.zeros(shape, sums))
        inner = inner.astype(jnp.float32)
        if x_scales_ref is not None:
            inner = inner * x_scales_ref[index, :][:, None]
        if w_scales_ref is not None:
            inner = inner * w_scales_ref[index, :][None, :]
        return total + inner

    if block is None:
        total = jax.lax.fori_loop(0, k // tiles.k, add, jnp.zeros(shape, sums))
    else:
        total = jax.lax.fori_loop(0, k // block, add_block, jnp.zeros(shape, jnp.float32))
    total = total.astype(jnp.float32) * x_end_ref[...][:, None] * w_end_ref[...][None, :]
    out_ref[...] = total.astype(out_ref.dtype)


def _as(x: Array, dtype: Any) -> Array:
    # Triton converts some integers and float8 to bfloat16 only through these.
    if x.dtype == jnp.int4:
        x = x.astype(jnp.int8)
    return x.astype(dtype)


def _without_float8(x: Array) -> Array:
    is_float8 = x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    return x.astype(jnp.bfloat16) if is_float8 else x
