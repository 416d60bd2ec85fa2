# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_matmul for Hopper with Mosaic GPU: WGMMA, TMA and specialised warpgroups.

As many programs as there are multiprocessors go through the list of tiles, a tile being 128 rows of
one group (schedule.py) and up to 256 columns. Each program has three warpgroups:

    2 that compute   64 rows each of the tile; they share the columns' operand
    1 that loads     both operands by TMA into a ring of slots, and runs ahead into the next tile

    multiply   rows [128 d] from their tile, weights [d columns] from their group, or transposed
    contract   see hopper_contract.py

Results go through shared memory to TMA. A tile that begins or ends inside another group writes only
its own rows, in copies of 64, 32, ... 1 rows. Rows past the last group are a group without a sum.

    bfloat16, float16          unchanged
    int8, float8, both factors unchanged, in int32 and float32; scales enter after the sum of their
                               block. WGMMA needs such operands contiguous along the sum: weights
                               are transposed before, in their 8 bits. Its sums of float8 lose
                               digits, and are moved to float32 every 512 products
    short blocks               of 64: widened to bfloat16, which is exact, as are their sums
    weights in few bits alone  see hopper_widened.py

`reason_against` in hopper_tiles.py has the unsupported cases. Rows are padded to a multiple of 8,
widths to one of 64 (128 for 8 bits), with zeros: a copy where they do not fit. On the CPU it runs
interpreted (`interpret=InterpretGPUParams()`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.array_types import Array, Int
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
)
from pallas_kernels.grouped_matmul.gpu.hopper_contract import contract
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import (
    COLUMNS,
    LINE,
    TILE,
    place_of,
    scratch,
    section_of,
    tiles_for,
)
from pallas_kernels.grouped_matmul.gpu.hopper_widened import multiply_widened
from pallas_kernels.grouped_matmul.gpu.operands import (
    Operands,
    operands_of,
    without_scales,
)
from pallas_kernels.grouped_matmul.gpu.schedule import ALIGNED, row_tiles
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.jax_versions import mosaic_gpu as plgpu
from pallas_kernels.quantized_array import QuantizedArray


def _multiply_kernel(
    tiles_ref, count_ref, rows_ref, weights_ref, *refs, tiles, steps, section, blocks,
    is_turned, registers, num_programs, num_groups,
):  # fmt: skip
    """Multiply; `weights_ref` is [G k n], or [G n k] where it is transposed."""
    if blocks:
        row_scales_ref, weight_scales_ref, *refs = refs
    out_ref, rows_smem, weights_smem, staged, cut, full, free = refs
    warpgroup = jax.lax.axis_index("warpgroup")
    ring = Ring(stages=tiles.stages, full=full, free=free)
    depth = tiles.depth
    columns = tiles.columns
    shape = (ROWS, columns)

    tile_of = functools.partial(place_of, tiles_ref, count_ref, tiles, steps, num_groups)

    total = count_ref[0] * tiles.num_columns

    stores = Stores(staged=staged.at[warpgroup], cut=cut.at[warpgroup])
    offset = warpgroup * ROWS

    def product(first: Array, last: Array) -> Array:
        operands = (rows_smem, warpgroup), (weights_smem, None)
        return registers.sum_of(shape, ring, first, last, operands, (False, is_turned))

    def scale(at: Array, column: Array, block: Array, x: Array) -> Array:
        x = x.astype(jnp.float32)
        if not blocks:
            return x
        row_scales = row_scales_ref.at[block, pl.ds(tiles_ref[at, 1] + offset, ROWS)]
        weight_scales = weight_scales_ref.at[tiles_ref[at, 0], block, pl.ds(column, columns)]
        x = x * along(registers.load(row_scales, 0), shape, 0)
        return x * along(registers.load(weight_scales, 1), shape, 1)

    def compute(index: Array, first: Array) -> Array:
        at, column, own_steps = tile_of(index)
        last = first + own_steps
        if section == steps and not blocks:
            out = product(first, last)
        else:
            per_block = steps // section // max(1, blocks)

            def add(part: Array, sums: Array) -> Array:
                start = first + part * section
                block = jax.lax.div(part, jnp.int32(per_block))
                return sums + scale(at, column, block, product(start, start + section))

            # Rows without a sum have no section: their scales may be NaN.
            zeros = registers.constant(shape, 0.0)
            out = jax.lax.fori_loop(0, jax.lax.div(own_steps, section), add, zeros)
        low, high = (tiles_ref[at, i] - offset for i in (2, 3))
        stores.put(out, out_ref, (tiles_ref[at, 1] + offset, column), (low, high))
        return last

    def load(index: Array, first: Array) -> Array:
        at, column, own_steps = tile_of(index)
        group = tiles_ref[at, 0]
        row = pl.multiple_of(tiles_ref[at, 1], 8)

        @pl.loop(0, own_steps)
        def _step(step: Array) -> None:
            slot = ring.acquire(first + step)
            inner = pl.ds(step * depth, depth)
            for part in range(COMPUTING):
                source = rows_ref.at[pl.ds(row + part * ROWS, ROWS), inner]
                plgpu.copy_gmem_to_smem(source, rows_smem.at[slot, part], full.at[slot])
            outer = pl.ds(column, columns)
            source = weights_ref.at[group, *((outer, inner) if is_turned else (inner, outer))]
            plgpu.copy_gmem_to_smem(source, weights_smem.at[slot], full.at[slot])

        return first + own_steps

    run_tiles(warpgroup, total, num_programs, ring, compute, load)


def multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
    interpret: Any = None,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    factors = operands_of(rows, weights, is_turned=is_turned)
    if jnp.issubdtype(factors.rows.dtype, jnp.floating) and factors.rows.dtype.itemsize == 2:
        if factors.weights.dtype != factors.rows.dtype:
            has_whole_steps = factors.blocks == 1 or factors.block_size % ROWS == 0
            if has_whole_steps and not is_turned:
                return multiply_widened(factors, group_sizes, out_dtype, interpret)
            factors = without_scales(rows, weights)
    elif factors.blocks > 1 and factors.block_size % LINE:
        # bfloat16 is exact, and so are the sums of such short blocks.
        factors = factors.widen()
    return _multiply(factors, group_sizes, is_turned, out_dtype, interpret)


def _multiply(
    factors: Operands, group_sizes: Array, is_turned: bool, out_dtype: Any, interpret: Any
) -> Array:
    rows = factors.rows
    weights = factors.weights
    blocks = factors.blocks
    depth = LINE // rows.dtype.itemsize
    if depth > ROWS and not is_turned:  # contiguous along the sum
        weights = weights.swapaxes(1, 2)
        is_turned = True
    num_rows = rows.shape[0]
    width = weights.shape[1 if is_turned else 2]
    rows = _filled_rows(rows, depth)
    weights = fill_zeros(weights, 1, *((64, depth) if is_turned else (depth, 64)))
    wide = weights.shape[1 if is_turned else 2]
    scales = ()
    if factors.row_scales is not None and factors.weight_scales is not None:
        scales = _filled_rows(factors.row_scales, 1).T, fill_zeros(factors.weight_scales, 1, 1, 64)
    steps = rows.shape[1] // depth
    section = section_of(steps, blocks, rows.dtype)
    tiles = tiles_for(wide, rows.dtype, most=COLUMNS[0] if section == steps else TILE)
    number = programs(interpret)
    kernel = functools.partial(
        _multiply_kernel,
        tiles=tiles,
        steps=steps,
        section=section,
        blocks=blocks,
        is_turned=is_turned,
        registers=Registers(is_interpreted=interpret is not None),
        num_programs=number,
        num_groups=weights.shape[0],
    )
    rhs = (tiles.columns, tiles.depth) if is_turned else (tiles.depth, tiles.columns)
    (out,) = call(
        kernel,
        (*row_tiles(rows.shape[0], group_sizes, TILE), rows, weights, *scales),
        (jax.ShapeDtypeStruct((rows.shape[0], wide), out_dtype),),
        scratch(tiles, rows.dtype, out_dtype, rhs),
        (number,),
        ("program",),
        interpret,
    )
    return out[:num_rows, :width]


def _filled_rows(x: Array, multiple: int) -> Array:
    """Pad rows [R d] to eights, at least one tile, and d to a multiple."""
    x = fill_zeros(x, ALIGNED, multiple)
    return jnp.pad(x, [(0, TILE - x.shape[0]), (0, 0)]) if x.shape[0] < TILE else x


PRODUCTS = Products(multiply=multiply, contract=contract)
