# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements the second product of grouped_matmul for Hopper: sums over the rows of every group.

    out[g] = sum over the rows r of g of rows[r]^T other_rows[r]

Tiles are 128 rows and up to 256 columns of one group's matrix; the group's rows pass, 64 at a time,
from its first row rounded down to a multiple of 8. Both factors are in shared memory as in global
memory, and WGMMA reads them transposed. Rows of neighbours are set to 0 in both factors (0 times
NaN would be NaN) by the computing warpgroups, in the first and the last step of a group only. An
empty group has no steps, and its matrix is 0.

See hopper.py. It takes bfloat16 and float16; float8 with one scale becomes bfloat16 before, which
is exact.
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
    call,
    fill_zeros,
    programs,
    run_tiles,
)
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import TILE, scratch, tiles_for
from pallas_kernels.grouped_matmul.gpu.operands import operands_of
from pallas_kernels.grouped_matmul.gpu.schedule import ALIGNED, spans_of
from pallas_kernels.jax_versions import mosaic_gpu as plgpu
from pallas_kernels.quantized_array import QuantizedArray


def _contract_kernel(
    starts_ref, ends_ref, rows_ref, others_ref, out_ref, rows_smem, others_smem, staged, cut,
    full, free, masked, *, tiles, registers, num_programs,
):  # fmt: skip
    warpgroup = jax.lax.axis_index("warpgroup")
    ring = Ring(stages=tiles.stages, full=full, free=free)
    depth = tiles.depth
    columns = tiles.columns
    num_rows = rows_ref.shape[0]
    groups, height, _ = out_ref.shape
    per_group = height // TILE * tiles.num_columns

    def tile_of(index: Array) -> tuple[Array, Array, Array]:
        """Return its group, row and column."""
        group, tile = _divide(index, per_group)
        row, column = _divide(tile, tiles.num_columns)
        return group, row * TILE, column * columns

    def steps_of(group: Array) -> tuple[Array, Array]:
        """Return the first row to read of a group, and the number of steps."""
        start = starts_ref[group]
        end = ends_ref[group]
        begin = jax.lax.div(start, jnp.int32(ALIGNED)) * ALIGNED
        steps = jax.lax.div(end - begin + (depth - 1), jnp.int32(depth))
        return begin, jnp.where(end > start, steps, 0)

    def first_row(begin: Array, step: Array) -> Array:
        """Return the first row of a step, which slides back rather than pass the last row."""
        return jnp.minimum(begin + step * depth, num_rows - depth)

    stores = Stores(staged=staged.at[warpgroup], cut=cut.at[warpgroup])

    def keep(ref: Any, low: Array, high: Array) -> None:
        """Zero the rows before `low` and from `high` on."""
        index = registers.index(ref.shape, 0)
        x = ref[...]
        ref[...] = jnp.where((index >= low) & (index < high), x, jnp.zeros_like(x))

    def compute(index: Array, first: Array) -> Array:
        group, row, column = tile_of(index)
        begin, steps = steps_of(group)

        def mask(step: Array, slot: Array) -> None:
            block_start = first_row(begin, step - first)
            low = jnp.maximum(begin + (step - first) * depth, starts_ref[group]) - block_start
            high = ends_ref[group] - block_start

            @pl.when((low > 0) | (high < depth))
            def _edge() -> None:
                keep(rows_smem.at[slot, warpgroup], low, high)

                @pl.when(warpgroup == 0)
                def _share() -> None:
                    keep(others_smem.at[slot], low, high)

                plgpu.commit_smem()
                plgpu.barrier_arrive(masked)
                plgpu.barrier_wait(masked)

        operands = (rows_smem, warpgroup), (others_smem, None)
        last = first + steps
        out = registers.sum_of(
            (ROWS, columns), ring, first, last, operands, (True, False), before=mask
        )
        stores.put(out, out_ref.at[group], (row + warpgroup * ROWS, column))
        return last

    def load(index: Array, first: Array) -> Array:
        group, row, column = tile_of(index)
        begin, steps = steps_of(group)

        @pl.loop(0, steps)
        def _step(step: Array) -> None:
            slot = ring.acquire(first + step)
            block_start = pl.ds(pl.multiple_of(first_row(begin, step), ALIGNED), depth)
            for part in range(COMPUTING):
                source = rows_ref.at[block_start, pl.ds(row + part * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(source, rows_smem.at[slot, part], full.at[slot])
            source = others_ref.at[block_start, pl.ds(column, columns)]
            plgpu.copy_gmem_to_smem(source, others_smem.at[slot], full.at[slot])

        return first + steps

    run_tiles(warpgroup, groups * per_group, num_programs, ring, compute, load)


def _divide(x: Array, by: int) -> tuple[Array, Array]:
    return jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by))


def contract(
    rows: Array | QuantizedArray,
    other_rows: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
    interpret: Any = None,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    factors = operands_of(rows, other_rows, is_turned=False)
    if factors.blocks:
        factors = factors.widen()
    is_scaled = factors.blocks > 0
    rows = factors.rows
    other_rows = factors.weights
    height = rows.shape[1]
    width = other_rows.shape[1]
    starts, ends = spans_of(rows.shape[0], group_sizes)
    rows = fill_zeros(rows, 8, TILE)
    other_rows = fill_zeros(other_rows, 8, 64)
    more = max(0, TILE - rows.shape[0])
    rows, other_rows = (jnp.pad(x, [(0, more), (0, 0)]) if more else x for x in (rows, other_rows))
    tiles = tiles_for(other_rows.shape[1], rows.dtype)
    number = programs(interpret)
    kernel = functools.partial(
        _contract_kernel,
        tiles=tiles,
        registers=Registers(is_interpreted=interpret is not None),
        num_programs=number,
    )
    shape = group_sizes.shape[0], rows.shape[1], other_rows.shape[1]
    stored = jnp.float32 if is_scaled else out_dtype
    rhs = tiles.depth, tiles.columns
    (out,) = call(
        kernel,
        (starts, ends, rows, other_rows),
        (jax.ShapeDtypeStruct(shape, stored),),
        (
            *scratch(tiles, rows.dtype, stored, rhs),
            plgpu.Barrier(num_arrivals=COMPUTING),
        ),
        (number,),
        ("program",),
        interpret,
    )
    out = out[:, :height, :width]
    return factors.scaled_product(out, group_sizes).astype(out_dtype) if is_scaled else out
