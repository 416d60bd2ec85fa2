# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements quantized_matmul for Hopper with both factors in 8 bits: float8, and exact integers.

    out [m n] = sum over sections of (x [m k] @ w [k n]) * x scales [m] * w scales [n], then * ends

WGMMA multiplies float8 with float8 and int8 with int8 twice as fast as bfloat16. A program writes a
tile of out: two warpgroups have 64 rows each and share what a third one loads by TMA.

Tensor cores sum integers in int32, exactly; they sum float8 with fewer digits than float32
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2), so such sums are moved to float32 registers after
every step of 128 products, as sums with blocks of scales are. Sums are moved half a tile at a time,
so that a tile of 128 by 256 fits: smaller ones read more than L2 delivers. Scales that hold for all
of k are applied before the tile is written.

WGMMA needs 8-bit factors with k along their rows. x has it so; XLA transposes w [k n] before the
kernel runs: a pass that reads and writes w once. By the limits of an H200 that is a third of the
time of the product at 1000 rows, and a twelfth at 4000; for few rows widened.py reads w without a
transpose. Where w is the transpose of a stored [n k], XLA drops both. In the same pass int4 becomes
int8, which Hopper can multiply.

Sizes that fill no whole tiles of 128 are padded with zeros, which copies. It runs on Hopper only;
on the CPU interpreted (`interpret=InterpretGPUParams()`). tiles.py has the tile sizes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.gpu.hopper_parts import (
    COMPUTING,
    REGISTERS_COMPUTING,
    REGISTERS_LOADING,
    ROWS,
    Registers,
    Ring,
    along,
    call,
    slot_of,
)
from pallas_kernels.jax_versions import mosaic_gpu as plgpu
from pallas_kernels.quantized_matmul.gpu.scales import Scaled, fill_tiles
from pallas_kernels.quantized_matmul.gpu.tiles import STEP_FEW_BITS, QuantizedTiles, tiles_few_bits

# Columns that are moved at a time, and columns that are written at a time.
_MOVED = 128
_PIECE = 64
# Tiles along n that programs take before the next tiles along m.
_WIDE = 8


def _few_bits_kernel(
    x_ref, w_ref, x_end_ref, w_end_ref, *refs, tiles, has_x, has_w, sums, registers
):
    x_scales_ref, refs = (refs[0], refs[1:]) if has_x else (None, refs)
    w_scales_ref, refs = (refs[0], refs[1:]) if has_w else (None, refs)
    out_ref, x_smem, w_smem, out_smem, x_scale_smem, w_scale_smem, full, free = refs
    ring = Ring(stages=tiles.stages, full=full, free=free)
    warpgroup = jax.lax.axis_index("warpgroup")
    counts = (out_ref.shape[0] // tiles.rows, out_ref.shape[1] // tiles.columns)
    row, column = plgpu.planar_snake(jax.lax.axis_index("tile"), counts, 1, _WIDE)
    steps = x_ref.shape[1] // STEP_FEW_BITS

    @pl.when(warpgroup < COMPUTING)
    def _compute():
        plgpu.set_max_registers(REGISTERS_COMPUTING, action="increase")
        rows = pl.ds(row * tiles.rows + warpgroup * ROWS, ROWS)
        warpgroup_rows = pl.ds(warpgroup * ROWS, ROWS)
        is_moved = sums == jnp.float32 or has_x or has_w
        width = min(_MOVED, tiles.columns) if is_moved else tiles.columns
        shape = (ROWS, width)
        parts = tuple(pl.ds(at * width, width) for at in range(tiles.columns // width))

        def release(step: Any) -> None:
            registers.free(free.at[slot_of(step, tiles.stages)], has_loaded=has_x or has_w)

        def scale(slot: Any, part: Any, total: Array) -> Array:
            total = total.astype(jnp.float32)
            if x_scale_smem is not None:
                scales = registers.load(x_scale_smem.at[slot, warpgroup_rows], 0)
                total = total * along(scales, shape, 0)
            if w_scale_smem is not None:
                scales = registers.load(w_scale_smem.at[slot, part], 1)
                total = total * along(scales, shape, 1)
            return total

        def move(step: Any, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            slot = ring.await_full(step)
            moved = []
            # While this warpgroup adds, the other one multiplies.
            for part, total in zip(parts, totals, strict=True):
                (product,) = registers.products(
                    shape, (x_smem.at[slot, warpgroup_rows], w_smem.at[slot, part])
                )
                moved.append(total + scale(slot, part, product))
            release(step)
            return tuple(moved)

        if is_moved:
            zeros = tuple(registers.constant(shape, 0.0) for _ in parts)
            totals = jax.lax.fori_loop(0, steps, move, zeros)
        else:
            operands = (x_smem, warpgroup_rows), (w_smem, None)
            first = jnp.int32(0)
            last = jnp.int32(steps)
            total = registers.sum_of(shape, ring, first, last, operands, (False, True))
            totals = (total.astype(jnp.float32),)
        ends = registers.load(x_end_ref.at[rows], 0)
        for at in range(tiles.columns // _PIECE):
            buffer = out_smem.at[warpgroup, at % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            total = totals[at * _PIECE // width]
            first = at * _PIECE % width
            piece = jax.lax.slice(total, (0, first), (ROWS, first + _PIECE))
            columns = pl.ds(column * tiles.columns + at * _PIECE, _PIECE)
            piece = piece * along(ends, (ROWS, _PIECE), 0)
            piece = piece * along(registers.load(w_end_ref.at[columns], 1), (ROWS, _PIECE), 1)
            buffer[...] = piece.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out_ref.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == COMPUTING)
    def _load():
        plgpu.set_max_registers(REGISTERS_LOADING, action="decrease")
        rows = pl.ds(row * tiles.rows, tiles.rows)
        columns = pl.ds(column * tiles.columns, tiles.columns)

        @pl.loop(0, steps)
        def _step(step: Array) -> None:
            slot = ring.acquire(step)
            arrives = full.at[slot]
            part = pl.ds(step * STEP_FEW_BITS, STEP_FEW_BITS)
            block = jax.lax.div(step, jnp.int32(tiles.section))
            plgpu.copy_gmem_to_smem(x_ref.at[rows, part], x_smem.at[slot], arrives)
            plgpu.copy_gmem_to_smem(w_ref.at[columns, part], w_smem.at[slot], arrives)
            if x_scales_ref is not None:
                source = x_scales_ref.at[block, rows]
                plgpu.copy_gmem_to_smem(source, x_scale_smem.at[slot], arrives)
            if w_scales_ref is not None:
                source = w_scales_ref.at[block, columns]
                plgpu.copy_gmem_to_smem(source, w_scale_smem.at[slot], arrives)

        ring.drain(jnp.int32(steps))


def multiply(factors: Scaled, *, out_dtype: Any, interpret: Any = None) -> Array:
    """Return x @ w of two factors that are both integers, or both float8 of one kind.

    Args:
        factors: Factors of the product.
        out_dtype: Dtype of the result.
        interpret: Interpreter for the CPU.
    """
    m = factors.x.shape[0]
    n = factors.w.shape[1]
    is_integer = jnp.issubdtype(factors.w.dtype, jnp.integer)
    tiles = tiles_few_bits(m, n, factors.block, jnp.dtype(out_dtype).itemsize)
    factors = fill_tiles(factors, m=tiles.rows, n=tiles.columns, k=STEP_FEW_BITS)
    dtype = jnp.int8 if is_integer else factors.w.dtype
    x = factors.x.astype(dtype)
    w = factors.w.astype(dtype).T
    ends = factors.ends()
    sums = jnp.int32 if is_integer else jnp.float32
    out = _call(x, w, ends, factors, tiles, sums, out_dtype, interpret)
    return out[:m, :n]


def _call(
    x: Array,
    w: Array,
    ends: tuple[Array, Array],
    factors: Scaled,
    tiles: QuantizedTiles,
    sums: Any,
    out_dtype: Any,
    interpret: Any,
) -> Array:
    m = x.shape[0]
    n = w.shape[0]
    stages = tiles.stages
    tables = (factors.x_blocks, factors.w_blocks)
    has_x, has_w = (table is not None for table in tables)
    (out,) = call(
        functools.partial(
            _few_bits_kernel,
            tiles=tiles,
            has_x=has_x,
            has_w=has_w,
            sums=sums,
            registers=Registers(is_interpreted=interpret is not None),
        ),
        (x, w, *ends, *(table for table in tables if table is not None)),
        (jax.ShapeDtypeStruct((m, n), out_dtype),),
        (
            _swizzle((stages, tiles.rows, STEP_FEW_BITS), x.dtype),
            _swizzle((stages, tiles.columns, STEP_FEW_BITS), w.dtype),
            _swizzle((COMPUTING, 2, ROWS, _PIECE), out_dtype),
            plgpu.SMEM((stages, tiles.rows), jnp.float32) if has_x else None,
            plgpu.SMEM((stages, tiles.columns), jnp.float32) if has_w else None,
            plgpu.Barrier(num_arrivals=2 + has_x + has_w, num_barriers=stages),
            plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=stages),
        ),
        (m // tiles.rows * (n // tiles.columns),),
        ("tile",),
        interpret,
    )
    return out


def _swizzle(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return shared memory in rows of 128 bytes."""
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)
