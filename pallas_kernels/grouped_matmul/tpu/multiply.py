# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""TPU kernel that multiplies rows by their group's matrix, with a fused epilogue.

    sums[r] = rows[r] @ weights[g]          transposed: rows[r] @ weights[g]^T
    outs[r] = follow(sums[r], extras[r])    0 past the last group, whatever `follow` would give

Matrices may come in parts, [G q k n]: with one array of rows each part has its own sums; with as
many arrays, [q R s], all add up to one. `follow` sees a tile of float32 sums and of the extra
operands, so that an activation or its gradient needs no pass through memory.

The grid is (columns, visit, part of the sum): visits.py assigns a tile of rows to a visit,
blocks.py how large tiles are. A tile of rows in one group is one product; otherwise the pieces with
rows of the group are computed and masked. Rows past the last group are read only where they share a
piece with other rows, and enter no sum.

With `sources` rows are read by index where they lie (gather.py): row r of the operation is row
sources[r] of the array.

On the CPU it runs in TPU interpret mode only (`pallas_kernels.interpreter.interpret_kernels`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.tpu.blocks import (
    PIECE,
    WHOLE,
    Bytes,
    Tile,
    blocks_for,
    vmem_limit,
)
from pallas_kernels.grouped_matmul.tpu.factors import Factors
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
from pallas_kernels.grouped_matmul.tpu.tiles import dot, times_scales
from pallas_kernels.grouped_matmul.tpu.visits import visit_rows
from pallas_kernels.jax_versions import match_varying, shape_varying_like

Follow = Callable[[list[Array], list[Array]], Sequence[Sequence[Array]]]
"""(sums, one [r o] each; list of extras [q r o] or [q r 1]) -> parts [r o] of each output."""


class _MultiplyCall(NamedTuple):
    """Static part of a call."""

    tile: Tile
    steps: int
    """Parts of the sum."""
    parts: int
    """Parts of the matrices."""
    is_turned: bool
    factors: Factors
    """Factors; their arrays are not used here."""
    num_extras: int
    num_outs: int
    follow: Follow
    is_gathered: bool = False
    """Whether rows are read by index."""

    @property
    def num_sums(self) -> int:
        """Number of sums: one per part, unless the rows have parts as well."""
        return self.parts if self.factors.rows.shape[0] == 1 else 1

    @property
    def is_decoded(self) -> bool:
        """Whether tiles of matrices are converted to another dtype."""
        return self.factors.mode == "tile" or self.factors.weights.dtype != self.factors.dtypes[1]

    @property
    def sum_dtype(self) -> Any:
        """Dtype of the sums: int32 for integers whose scales enter at the end."""
        is_integer = jnp.issubdtype(self.factors.dtypes[1], jnp.integer)
        return jnp.int32 if is_integer and self.factors.mode != "chunks" else jnp.float32


def multiply_and(
    follow: Follow,
    factors: Factors,
    group_sizes: Int[Array, " G"],
    outs: Sequence[tuple[int, Any]],
    *,
    extras: Sequence[Float[Array, "_ R _"]] = (),
    is_turned: bool = False,
    sources: Int[Array, " R"] | None = None,
    name: str = "grouped_matmul",
) -> list[Array]:
    """Run the kernel.

    Args:
        follow: Epilogue of the sums.
        factors: Rows [p R s] and weights [G q k n].
        group_sizes: Rows of each group, as in `grouped_matmul`.
        outs: Number of parts and dtype of each output.
        extras: Operands in the shape of the result, in parts; or with one number a row.
        is_turned: Whether the sum runs over n.
        sources: Row of the array [1 T s] for each row of the operation; None: the rows are the
            array. For `takes_rows` arrays, and floating matrices.
        name: Name of the kernel in profiles.

    Returns:
        The outputs, [parts R o] each.
    """
    (_, num_rows, summed), (_, _, k, n) = factors.rows.shape, factors.weights.shape
    num_rows = num_rows if sources is None else sources.shape[0]
    parts = factors.parts
    width = k if is_turned else n
    tile = _tile(factors, num_rows, width, outs, extras, is_turned=is_turned)
    if sources is not None:
        tile = tile._replace(summed=even_block(summed, tile.summed))
    visits = visit_rows(group_sizes, num_rows, tile.rows)
    call = _MultiplyCall(
        tile=tile,
        steps=summed // tile.summed,
        parts=parts,
        is_turned=is_turned,
        factors=factors,
        num_extras=len(extras),
        num_outs=len(outs),
        follow=follow,
        is_gathered=sources is not None,
    )
    arrays, specs = _operands(call, sources, visits.number)
    by_row = [
        pl.BlockSpec((x.shape[0], tile.rows, 1), lambda o, v, s, *at: (0, at[1][v], 0))
        if x.shape[2] == 1
        else pl.BlockSpec((x.shape[0], tile.rows, tile.out), lambda o, v, s, *at: (0, at[1][v], o))
        for x in extras
    ]
    operands = [*visits.as_read(), *arrays, *extras]
    scratch = []
    if call.is_gathered:
        scratch += scratch_of(tile.rows, tile.summed, factors.rows.dtype)
    if call.is_decoded:
        sides = (tile.out, tile.summed) if is_turned else (tile.summed, tile.out)
        scratch.append(pltpu.VMEM((parts, *sides), factors.dtypes[1]))
    if call.steps > 1:
        scratch.append(pltpu.VMEM((call.num_sums, tile.rows, tile.out), call.sum_dtype))
    result_bytes = sum(c * jnp.dtype(d).itemsize for c, d in outs)
    results = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits),
            grid=(-(-width // tile.out), visits.number, call.steps),
            in_specs=[*specs, *by_row],
            out_specs=[
                pl.BlockSpec((c, tile.rows, tile.out), lambda o, v, s, *at: (0, at[2][v], o))
                for c, _ in outs
            ],
            scratch_shapes=scratch,
        ),
        out_shape=[shape_varying_like((c, num_rows, width), d, *operands) for c, d in outs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_limit(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * parts * num_rows * k * n,
            transcendentals=0,
            bytes_accessed=factors.rows.shape[0]
            * num_rows
            * summed
            * factors.rows.dtype.itemsize
            * -(-width // tile.out)
            + sum(x.nbytes for x in (factors.weights, *factors.more))
            + sum(x.nbytes for x in extras)
            + num_rows * width * result_bytes,
        ),
        name=name,
    )(*match_varying(operands, operands))
    return list(results)


def _tile(
    factors: Factors,
    num_rows: int,
    width: int,
    outs: Sequence[tuple[int, Any]],
    extras: Sequence[Array],
    *,
    is_turned: bool,
) -> Tile:
    """Return the tile; all copied arrays are double-buffered."""
    (arrays, _, summed), k = factors.rows.shape, factors.weights.shape[2]
    parts = factors.parts
    decoded = factors.dtypes[1].itemsize if factors.mode != "none" else 0
    result = sum(c * jnp.dtype(d).itemsize for c, d in outs)
    result += sum(x.shape[0] * x.itemsize for x in extras if x.shape[2] > 1)
    unit = 1
    if factors.weight_scales is not None and factors.weight_scales.shape[-2] > 1:
        unit = k // factors.weight_scales.shape[-2]
    return blocks_for(
        "multiply",
        num_rows,
        width,
        summed,
        each=Bytes(
            lhs=2 * arrays * factors.rows.dtype.itemsize,
            rhs=parts * (2 * factors.weights.dtype.itemsize + decoded),
            result=2 * result + 8 * (parts if arrays == 1 else 1),
        ),
        is_wide=factors.dtypes[1] == jnp.float32,
        sums=parts if arrays == 1 else 1,
        unit=Tile(1, unit, 1) if is_turned else Tile(1, 1, unit),
    )


def _operands(
    call: _MultiplyCall, sources: Int[Array, " R"] | None, num_visits: int
) -> tuple[list[Array], list[pl.BlockSpec]]:
    """Return rows, matrices and scales, with their block specs."""
    f = call.factors
    tile = call.tile
    across, along = (tile.out, tile.summed) if call.is_turned else (tile.summed, tile.out)

    def rows(o: Any, v: Any, s: Any, group: Any, read: Any, *scalars: Any) -> Any:
        return 0, read[v], s

    def matrix(o: Any, v: Any, s: Any, group: Any, *scalars: Any) -> Any:
        return group[v], 0, *((o, s) if call.is_turned else (s, o))

    if sources is None:
        arrays = [f.rows]
        specs = [pl.BlockSpec((f.rows.shape[0], tile.rows, tile.summed), rows)]
    else:
        indices = indices_by_tile(sources, tile.rows)
        arrays = [words_of(f.rows[0], tile.summed), indices, indices]
        specs = [pl.BlockSpec(memory_space=pl.ANY)]
        specs += index_specs(tile.rows, lambda o, v, s, *at: (v, at[1]), num_visits)
    matrices = [f.weights, *f.more]
    arrays += matrices
    specs += [pl.BlockSpec((None, x.shape[1], across, along), matrix) for x in matrices]
    if f.row_scales is not None:
        pieces = call.steps if f.mode == "chunks" else 1
        scales = f.row_scales.reshape(f.row_scales.shape[0], pieces, -1).swapaxes(0, 1)
        arrays.append(scales)
        specs.append(
            pl.BlockSpec(
                (None, tile.rows, scales.shape[2]),
                lambda o, v, s, *at: (s if pieces > 1 else 0, at[1][v], 0),
            )
        )
    if f.mode == "end":
        assert f.weight_scales is not None
        arrays.append(f.weight_scales)
        specs.append(
            pl.BlockSpec(
                (None, call.parts, 1, tile.out),
                lambda o, v, s, group, *scalars: (group[v], 0, 0, o),
            )
        )
    elif f.weight_scales is not None:
        groups, parts, blocks, n = f.weight_scales.shape
        cuts = 1 if blocks == 1 else f.weights.shape[2] // across
        arrays.append(f.weight_scales.reshape(groups, parts, cuts, blocks // cuts, n))

        def scale(o: Any, v: Any, s: Any, group: Any, *scalars: Any) -> Any:
            _, _, cut, column = matrix(o, v, s, group)
            return group[v], 0, cut if cuts > 1 else 0, 0, column

        specs.append(pl.BlockSpec((None, parts, None, blocks // cuts, along), scale))
    return arrays, specs


def _kernel(
    group: Any, read: Any, write: Any, low: Any, high: Any, *refs: Any, call: _MultiplyCall
) -> None:
    f = call.factors
    tile = call.tile
    operands = iter(refs)
    rows = next(operands)
    sources = [next(operands) for _ in range(2 * call.is_gathered)]
    weights = next(operands)
    more = [next(operands) for _ in f.more]
    row_scales: Any = next(operands) if f.row_scales is not None else None
    weight_scales: Any = next(operands) if f.weight_scales is not None else None
    extras = [next(operands) for _ in range(call.num_extras)]
    outs = [next(operands) for _ in range(call.num_outs)]
    copies = RowCopies(rows, next(operands), next(operands)) if call.is_gathered else None
    matrices: Any = next(operands) if call.is_decoded else weights
    totals: Any = next(operands) if call.steps > 1 else None
    visit = pl.program_id(1)
    step = pl.program_id(2)
    before = jnp.maximum(visit - 1, 0)
    first_row = low[visit]
    end_row = high[visit]
    is_whole = (first_row == 0) & (end_row == tile.rows)
    has_rows = first_row < end_row
    own_rows: Any = None
    if copies is not None:
        own_rows = copies.advance(
            sources, GridPlace(visit, step, pl.num_programs(1), call.steps), low, high
        )

    if call.is_decoded:
        # A matrix that is cut along the sum is copied at each step.
        is_new = (visit == 0) | (group[visit] != group[before]) | (call.steps > 1)

        @pl.when(has_rows & is_new)
        def _():
            for part in range(call.parts):
                values = weights[part]
                scales = None
                if f.mode == "tile":
                    scales = weight_scales[part]
                matrices[part] = times_scales(values, scales, f.dtypes[1])

    @pl.when(((visit == 0) | (write[visit] != write[before])) & (step == 0) & ~is_whole)
    def _():
        for out in outs:
            out[...] = jnp.zeros(out.shape, out.dtype)

    def rows_of(part: int, at: Any) -> Array:
        if own_rows is not None:
            return values_of(own_rows[at, :], f.dtypes[0])
        return rows[part if rows.shape[0] > 1 else 0, at, :].astype(f.dtypes[0])

    def sums_of(at: Any) -> list[Array]:
        products = [
            _product(call, rows_of(part, at), matrices, row_scales, weight_scales, part, at)
            for part in range(call.parts - len(more))
        ]
        products += [
            _product(call, rows_of(len(products) + i, at), matrix, None, None, 0, at)
            for i, matrix in enumerate(more)
        ]
        return products if call.num_sums > 1 else [sum(products[1:], products[0])]

    def finish(at: Any, sums: list[Array], is_own: Array | None) -> None:
        if f.mode == "end":
            scales = (weight_scales[part].astype(jnp.float32) for part in range(call.parts))
            sums = [x.astype(jnp.float32) * y for x, y in zip(sums, scales, strict=True)]
            if row_scales is not None:
                sums = [x * row_scales[at, :] for x in sums]
        tiles = [extra[:, at, :] for extra in extras]
        for out, values in zip(outs, call.follow(sums, tiles), strict=True):
            for part, value in enumerate(values):
                if is_own is not None:
                    value = jnp.where(is_own, value, out[part, at, :].astype(jnp.float32))
                out[part, at, :] = value.astype(out.dtype)

    def compute(at: Any, is_own: Array | None) -> None:
        sums = sums_of(at)
        if totals is None:
            finish(at, sums, is_own)
            return

        @pl.when(step == 0)
        def _():
            for i, value in enumerate(sums):
                totals[i, at, :] = value

        @pl.when(step > 0)
        def _():
            for i, value in enumerate(sums):
                totals[i, at, :] += value

        @pl.when(step == call.steps - 1)
        def _():
            finish(at, [totals[i, at, :] for i in range(call.num_sums)], is_own)

    @pl.when(is_whole)
    def _():
        piece = WHOLE if tile.rows % WHOLE == 0 else tile.rows

        def body(i: Any, carry: Any) -> Any:
            compute(pl.ds(pl.multiple_of(i * piece, piece), piece), None)
            return carry

        jax.lax.fori_loop(0, tile.rows // piece, body, jnp.int32(0))

    @pl.when(has_rows & ~is_whole)
    def _():
        over_pieces(tile.rows, tile.out, first_row, end_row, compute)


def over_pieces(
    rows: int, width: int, low: Any, high: Any, compute: Callable[[Any, Array], None]
) -> None:
    """Call compute(rows, mask of the group) for the pieces with rows of the group.

    Args:
        rows: Rows of the tile.
        width: Width of the mask.
        low: First row of the group in the tile.
        high: Last row of the group in the tile + 1.
        compute: Computes a piece.
    """
    piece = PIECE if rows % PIECE == 0 else rows

    def body(i: Any, carry: Any) -> Any:
        start = pl.multiple_of(i * piece, piece)
        index = start + jax.lax.broadcasted_iota(jnp.int32, (piece, width), 0)
        compute(pl.ds(start, piece), (index >= low) & (index < high))
        return carry

    jax.lax.fori_loop(low // piece, pl.cdiv(high, piece), body, jnp.int32(0))


def _product(
    call: _MultiplyCall,
    x: Array,
    matrices: Any,
    row_scales: Any,
    weight_scales: Any,
    part: int,
    at: Any,
) -> Array:
    """Return the product of rows with one part of the matrices over the sum of one step."""
    f = call.factors
    contracted = ((1,), (1,)) if call.is_turned else ((1,), (0,))
    if f.mode != "chunks":
        return dot(x, matrices[part], contracted)
    number = weight_scales.shape[1]
    size = call.tile.summed // number
    scales = row_scales[at, :]
    total = None
    for i in range(number):
        piece_slice = slice(i * size, (i + 1) * size)
        piece = dot(x[:, piece_slice], matrices[part, piece_slice, :], contracted).astype(
            jnp.float32
        )
        piece = piece * scales[:, i : i + 1] * weight_scales[part, i : i + 1, :]
        total = piece if total is None else total + piece
    assert total is not None
    return total
