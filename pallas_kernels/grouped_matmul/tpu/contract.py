# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""TPU kernel that contracts rows with other rows of their group: the gradient of its matrix.

    out[g, p] = scale * sum over the rows r of g of rows[r]^T other_rows[p, r]

The grid is (left columns, part and right columns, visit); the sums of a group stay in memory over
its visits (visits.py), and an empty group has one visit, in which they are written as 0. Rows of
other groups that share a tile are left out piece by piece, and masked within a piece, in both
factors: rows past the last group may be NaN. One of both can be read by index (gather.py).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.tpu.blocks import Bytes, Tile, blocks_for, vmem_limit
from pallas_kernels.grouped_matmul.tpu.gather import (
    GridPlace,
    RowCopies,
    even_block,
    index_specs,
    indices_by_tile,
    scratch_of,
    values_of,
    words_of,
)
from pallas_kernels.grouped_matmul.tpu.multiply import over_pieces
from pallas_kernels.grouped_matmul.tpu.tiles import dot
from pallas_kernels.grouped_matmul.tpu.visits import visit_groups
from pallas_kernels.jax_versions import match_varying, shape_varying_like


class _ContractCall(NamedTuple):
    """Static part of a call."""

    tile: Tile
    dtypes: tuple[Any, Any]
    """Dtypes in which tiles of both factors are multiplied."""
    has_scale: bool
    gathered: int | None = None
    """Which of both factors is read by index."""


def contract_parts(
    rows: Array,
    other_rows: Array,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
    dtypes: tuple[Any, Any] | None = None,
    scale: Float[Array, ""] | None = None,
    part: int | None = None,
    sources: Int[Array, " R"] | None = None,
    gathers_others: bool = False,
    name: str = "grouped_outer",
) -> Float[Array, "G p k n"]:
    """Run the kernel.

    Args:
        rows: [R k].
        other_rows: [p R n], in parts.
        group_sizes: Rows of each group, as in `grouped_matmul`.
        out_dtype: Dtype of the result.
        dtypes: Dtypes in which tiles of both are multiplied; None keeps them.
        scale: Factor of the result.
        part: Number of the only part of `other_rows` to contract; None takes all.
        sources: Row of one of both arrays for each row of the operation, [T k] or [1 T n] of which
            `takes_rows` holds; None: the rows are the arrays.
        gathers_others: Whether that is `other_rows`.
        name: Name of the kernel in profiles.
    """
    (num_rows, k), (parts, _, n), groups = rows.shape, other_rows.shape, group_sizes.shape[0]
    num_rows = num_rows if sources is None else sources.shape[0]
    first, parts = (0, parts) if part is None else (part, 1)
    dtypes = dtypes or (rows.dtype, other_rows.dtype)
    each = Bytes(
        lhs=2 * rows.dtype.itemsize,
        rhs=2 * other_rows.dtype.itemsize,
        result=2 * jnp.dtype(out_dtype).itemsize + 8,
    )
    is_wide = dtypes[0] == jnp.float32
    tile = blocks_for("contract", num_rows, n, k, each=each, is_wide=is_wide)
    scratch = []
    if sources is not None and gathers_others:
        tile = tile._replace(out=even_block(n, tile.out))
        scratch = scratch_of(tile.rows, tile.out, other_rows.dtype)
    elif sources is not None:
        tile = tile._replace(summed=even_block(k, tile.summed))
        scratch = scratch_of(tile.rows, tile.summed, rows.dtype)
    visits = visit_groups(group_sizes, num_rows, tile.rows)
    wide = -(-n // tile.out)
    arrays = [rows, other_rows]
    specs = [
        pl.BlockSpec((tile.rows, tile.summed), lambda i, j, v, *at: (at[1][v], i)),
        pl.BlockSpec(
            (None, tile.rows, tile.out),
            lambda i, j, v, *at: (first + j // wide, at[1][v], j % wide),
        ),
    ]
    if sources is not None:
        packed = (
            words_of(other_rows[0], tile.out) if gathers_others else words_of(rows, tile.summed)
        )
        arrays[gathers_others] = packed
        specs[gathers_others] = pl.BlockSpec(memory_space=pl.ANY)
        arrays += [indices_by_tile(sources, tile.rows)] * 2
        specs += index_specs(tile.rows, lambda i, j, v, *at: (v, at[1]), visits.number)
    operands = [*visits.as_read(), *arrays]
    if scale is not None:
        operands.append(scale.reshape(1))
        specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    is_integer = jnp.issubdtype(dtypes[0], jnp.integer)
    sums = jnp.int32 if is_integer else jnp.float32
    gathered = None if sources is None else int(gathers_others)
    call = _ContractCall(tile, dtypes, scale is not None, gathered)
    return pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(-(-k // tile.summed), parts * wide, visits.number),
            in_specs=specs,
            out_specs=pl.BlockSpec(
                (None, None, tile.summed, tile.out),
                lambda i, j, v, *at: (at[0][v], j // wide, i, j % wide),
            ),
            scratch_shapes=[pltpu.VMEM((tile.summed, tile.out), sums), *scratch],
        ),
        out_shape=shape_varying_like((groups, parts, k, n), out_dtype, *operands),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * parts * num_rows * k * n,
            transcendentals=0,
            bytes_accessed=num_rows * k * rows.dtype.itemsize * parts * wide
            + parts * num_rows * n * other_rows.dtype.itemsize * -(-k // tile.summed)
            + groups * parts * k * n * jnp.dtype(out_dtype).itemsize,
        ),
        name=name,
    )(*match_varying(operands, operands))


def _kernel(
    group: Any, read_tiles: Any, write: Any, low: Any, high: Any, *refs: Any, call: _ContractCall
) -> None:
    del read_tiles, write
    *factors, out, sums = refs if call.gathered is None else refs[:-2]
    visit = pl.program_id(2)
    last = pl.num_programs(2) - 1
    first_row = low[visit]
    end_row = high[visit]
    tile = call.tile
    is_whole = (first_row == 0) & (end_row == tile.rows)
    if call.gathered is not None:
        copies = RowCopies(factors[call.gathered], *refs[-2:])
        block = pl.program_id(call.gathered)
        step = GridPlace(visit, 0, pl.num_programs(2))
        factors[call.gathered] = copies.advance(factors[2:4], step, low, high, block)

    def read(factor: int, at: Any) -> Array:
        values = factors[factor][at, :]
        return values_of(values, call.dtypes[factor]) if factor == call.gathered else values

    @pl.when((visit == 0) | (group[visit] != group[jnp.maximum(visit - 1, 0)]))
    def _():
        sums[...] = jnp.zeros(sums.shape, sums.dtype)

    def add(lhs: Array, rhs: Array) -> None:
        lhs, rhs = (x.astype(d) for x, d in zip((lhs, rhs), call.dtypes, strict=True))
        sums[...] += dot(lhs, rhs, ((0,), (0,)))

    @pl.when(is_whole)
    def _():
        add(read(0, slice(None)), read(1, slice(None)))

    @pl.when((first_row < end_row) & ~is_whole)
    def _():
        def add_piece(at: Any, is_own: Any) -> None:
            add(_kept(read(0, at), is_own), _kept(read(1, at), is_own))

        over_pieces(tile.rows, 1, first_row, end_row, add_piece)

    @pl.when((visit == last) | (group[visit] != group[jnp.minimum(visit + 1, last)]))
    def _():
        total = sums[...].astype(jnp.float32)
        if call.has_scale:
            total = total * factors[-1][0]
        out[...] = total.astype(out.dtype)


def _kept(x: Array, is_own: Array) -> Array:
    """Zero the other rows; selected in 32 bits, as TPUs do."""
    wide = x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32)
    return jnp.where(is_own, wide, jnp.zeros_like(wide)).astype(x.dtype)
