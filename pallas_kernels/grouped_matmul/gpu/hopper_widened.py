# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_matmul for Hopper with weights in few bits: W8A16, W4A16, float8 weights.

Weights are read once, in 8 or 4 bits, and become the dtype of rows on their way to the tensor
cores. Each computing warpgroup has its own columns and all rows of the tile:

    loads      slots of rows, and of weights, by TMA
    compute    a step of its weights from the slot into registers, widened there, and written back
               as WGMMA reads it, while the product of the step before is under way

Where a group has few rows (as in decoding) a tile has 64 of them. Scales enter after the sum of
their block. See hopper.py; transposed weights, and blocks that are no multiple of 64, become
floating before and are multiplied there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array
from pallas_kernels.gpu.hopper_parts import (
    COMPUTING,
    ROWS,
    Registers,
    Ring,
    Stores,
    along,
    call,
    fill_zeros,
    programs,
    run_tiles,
    shared_memory,
    slot_of,
)
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import (
    LINE,
    WidenedTiles,
    place_of,
    tiles_widened,
)
from pallas_kernels.grouped_matmul.gpu.operands import Operands
from pallas_kernels.grouped_matmul.gpu.schedule import ALIGNED, row_tiles
from pallas_kernels.jax_versions import mosaic_gpu as plgpu


def _widened_kernel(
    tiles_ref, count_ref, rows_ref, weights_ref, scales_ref, out_ref, rows_smem, weights_smem, wide,
    staged, cut, full, free, *, tiles, steps, blocks, registers, num_programs, num_groups,
):  # fmt: skip
    warpgroup = jax.lax.axis_index("warpgroup")
    ring = Ring(stages=tiles.stages, full=full, free=free)
    shape = (tiles.rows, tiles.columns)
    total = count_ref[0] * tiles.num_columns

    tile_of = functools.partial(place_of, tiles_ref, count_ref, tiles, steps, num_groups)

    stores = Stores(staged=staged.at[warpgroup], cut=cut.at[warpgroup])

    def widen_tile(step: Array) -> Any:
        return wide.at[warpgroup, slot_of(step, 2)]

    def widen(step: Array) -> None:
        slot = ring.await_full(step)
        few_bits = weights_smem.at[slot, warpgroup]
        widen_tile(step)[...] = registers.widen(few_bits, rows_smem.dtype)
        plgpu.commit_smem()

    def compute(index: Array, first: Array) -> Array:
        at, column, own_steps = tile_of(index)
        last = first + own_steps
        column = column + warpgroup * tiles.columns
        pl.when(own_steps > 0)(lambda: widen(first))

        def step(at: Array, sums: Array) -> Array:
            slot = slot_of(at, tiles.stages)

            def widen_next() -> None:
                pl.when(at + 1 < last)(lambda: widen(at + 1))

            sums = registers.add_while(sums, rows_smem.at[slot], widen_tile(at), widen_next)
            registers.free(free.at[slot])
            return sums

        per_block = steps // blocks

        def scale(block: Array) -> Array:
            start = first + block * per_block
            zeros = registers.constant(shape, 0.0)
            sums = jax.lax.fori_loop(start, start + per_block, step, zeros)
            scales = scales_ref.at[tiles_ref[at, 0], block, pl.ds(column, tiles.columns)]
            return sums * along(registers.load(scales, 1), shape, 1)

        # Rows without a sum have no block, and no scales.
        out = jax.lax.fori_loop(
            0,
            jax.lax.div(own_steps, per_block),
            lambda block, sums: scale(block) if blocks == 1 else sums + scale(block),
            registers.constant(shape, 0.0),
        )
        for i in range(0, tiles.rows, ROWS):
            row = tiles_ref[at, 1] + i
            bounds = tiles_ref[at, 2] - i, tiles_ref[at, 3] - i
            stores.put(out[i : i + ROWS], out_ref, (row, column), bounds)
        return last

    def load(index: Array, first: Array) -> Array:
        at, column, own_steps = tile_of(index)
        group = tiles_ref[at, 0]
        row = pl.multiple_of(tiles_ref[at, 1], ALIGNED)

        @pl.loop(0, own_steps)
        def _step(step: Array) -> None:
            slot = ring.acquire(first + step)
            inner = pl.ds(step * tiles.depth, tiles.depth)
            source = rows_ref.at[pl.ds(row, tiles.rows), inner]
            plgpu.copy_gmem_to_smem(source, rows_smem.at[slot], full.at[slot])
            for part in range(COMPUTING):
                outer = pl.ds(column + part * tiles.columns, tiles.columns)
                source = weights_ref.at[group, inner, outer]
                plgpu.copy_gmem_to_smem(source, weights_smem.at[slot, part], full.at[slot])

        return first + own_steps

    run_tiles(warpgroup, total, num_programs, ring, compute, load)


def _scratch(tiles: WidenedTiles, dtype: Any, few_bits: Any, out_dtype: Any) -> tuple[Any, ...]:
    bits = 4 if few_bits == jnp.int4 else 8
    line = LINE // jnp.dtype(out_dtype).itemsize
    raw = plgpu.SMEM(
        (tiles.stages, COMPUTING, tiles.depth, tiles.columns),
        few_bits,
        transforms=(
            plgpu.TilingTransform((8, tiles.columns)),
            plgpu.SwizzleTransform(tiles.columns * bits // 8),
        ),
    )
    return (
        shared_memory((tiles.stages, tiles.rows, tiles.depth), dtype),
        raw,
        shared_memory((COMPUTING, 2, tiles.depth, tiles.columns), dtype),
        shared_memory((COMPUTING, 2, ROWS, line), out_dtype),
        plgpu.SMEM((COMPUTING, ROWS, line), out_dtype),
        plgpu.Barrier(num_arrivals=COMPUTING + 1, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tiles.stages),
    )


def multiply_widened(
    factors: Operands, group_sizes: Array, out_dtype: Any, interpret: Any = None
) -> Array:
    """Return floating rows times the weights of their group, which have few bits.

    Args:
        factors: Rows of 16 bits, weights [G k n] of 8 or 4, and scales of the weights.
        group_sizes: Rows of each group.
        out_dtype: Dtype of the result.
        interpret: Interpreter for the CPU.
    """
    assert factors.weight_scales is not None
    (num_rows, _), (groups, _, width) = factors.rows.shape, factors.weights.shape
    tiles = tiles_widened(num_rows, groups, width, factors.weights.dtype, factors.blocks)
    rows = fill_zeros(factors.rows, ALIGNED, tiles.depth)
    rows = jnp.pad(rows, [(0, max(0, tiles.rows - rows.shape[0])), (0, 0)])
    weights = fill_zeros(factors.weights, 1, tiles.depth, COMPUTING * ROWS)
    scales = fill_zeros(factors.weight_scales, 1, 1, COMPUTING * ROWS)
    number = programs(interpret)
    (out,) = call(
        functools.partial(
            _widened_kernel,
            tiles=tiles,
            steps=weights.shape[1] // tiles.depth,
            blocks=factors.blocks,
            registers=Registers(is_interpreted=interpret is not None),
            num_programs=number,
            num_groups=groups,
        ),
        (*row_tiles(rows.shape[0], group_sizes, tiles.rows), rows, weights, scales),
        (jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2]), out_dtype),),
        _scratch(tiles, rows.dtype, weights.dtype, out_dtype),
        (number,),
        ("program",),
        interpret,
    )
    return out[:num_rows, :width]
