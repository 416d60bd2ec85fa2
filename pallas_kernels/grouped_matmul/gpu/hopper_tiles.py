# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Hopper kernels of grouped_matmul, and the factors that they take.

A program has 128 rows of the result, 64 per computing warpgroup, and `columns` columns, and goes
through the sum `depth` at a time: 128 bytes, which is what TMA and WGMMA swizzle. Shared memory
limits the number of slots: a slot holds 128 + columns rows of 128 bytes. Pure arithmetic, without a
device.

To tune the kernels: `COLUMNS`, `STAGES` and `PANEL`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.hopper_parts import COMPUTING, ROWS, SHARED, shared_memory
from pallas_kernels.jax_versions import mosaic_gpu as plgpu

TILE = COMPUTING * ROWS
"""Rows of a tile of the result."""
LINE = 128
"""Bytes of a row in shared memory."""
COLUMNS = (256, 192, 128, 64)
"""Columns of the result, best first. WGMMA with 64 rows has the full rate from 128 on."""
STAGES = 4
PANEL = 8
"""Column tiles that programs go through before the next rows; repeated reads are in L2."""
FLOAT8_PRODUCTS = 512
"""Products whose sum is left to WGMMA, which keeps some 14 bits of it (arXiv 2412.19437,
section 3.3.2).
"""
EXACT_PRODUCTS = 256
"""Products of two int8 in bfloat16 whose sum is below 2^22: exact in float32 however WGMMA aligns
it.
"""
# Staging of results: two slots per warpgroup, and one for partial rows.
_STAGED = COMPUTING * 3 * ROWS * LINE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupedTiles:
    """Tiles of one kernel."""

    columns: int
    depth: int
    """Length of the sum per step."""
    stages: int
    panel: int
    """Column tiles side by side."""
    num_columns: int
    """Number of column tiles."""

    @property
    def step(self) -> int:
        """Columns of a tile."""
        return self.columns


def tiles_for(width: int, dtype: Any, *, most: int = COLUMNS[0]) -> GroupedTiles:
    """Return the tiles for a result `width` wide, a multiple of 64.

    Args:
        width: Columns of the result.
        dtype: Dtype of the factors.
        most: Largest number of columns, where sums take registers twice.
    """
    columns = next(x for x in COLUMNS if width % x == 0 and x <= most)
    number = width // columns
    return GroupedTiles(
        columns=columns,
        depth=LINE // jnp.dtype(dtype).itemsize,
        stages=min(STAGES, (SHARED - _STAGED) // ((TILE + columns) * LINE)),
        panel=next(x for x in range(min(PANEL, number), 0, -1) if number % x == 0),
        num_columns=number,
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WidenedTiles:
    """Tiles of the kernel whose weights have few bits."""

    rows: int
    """Rows of all computing warpgroups."""
    columns: int
    """Columns of each computing warpgroup."""
    depth: int
    stages: int
    panel: int
    num_columns: int
    """Number of column tiles, of both warpgroups' columns."""

    @property
    def step(self) -> int:
        """Columns of a tile."""
        return COMPUTING * self.columns


def tiles_widened(
    num_rows: int, groups: int, width: int, few_bits: Any, blocks: int
) -> WidenedTiles:
    """Return the tiles for rows of 16 bits and weights of 8 or 4.

    Args:
        num_rows: Rows of all groups.
        groups: Number of groups.
        width: Columns of the result.
        few_bits: Dtype of the weights.
        blocks: Number of blocks with their own scales, for which sums take registers twice.
    """
    width += -width % TILE
    rows = ROWS if num_rows <= ROWS * groups else TILE
    is_wide = width % (2 * TILE) == 0 and (blocks == 1 or rows == ROWS)
    columns = TILE if is_wide else ROWS
    number = width // (COMPUTING * columns)
    depth = LINE // 2
    bits = 4 if few_bits == jnp.int4 else 8
    slot = depth * (rows * 2 + COMPUTING * columns * bits // 8)
    free_bytes = SHARED - _STAGED - COMPUTING * 2 * depth * columns * 2
    return WidenedTiles(
        rows=rows,
        columns=columns,
        depth=depth,
        stages=min(2 * STAGES, free_bytes // slot),
        panel=next(x for x in range(min(PANEL, number), 0, -1) if number % x == 0),
        num_columns=number,
    )


def place_of(
    rows: Any, count: Any, tiles: Any, steps: int, groups: int, index: Any
) -> tuple[Any, Any, Any]:
    """Return a tile's place in the list of row tiles, its first column, and the steps of its sum.

    Programs go through a panel of column tiles for all rows, then through the next.

    Args:
        rows: List of row tiles, whose first number is the group; see `row_tiles`.
        count: Number of row tiles, in memory.
        tiles: Tiles of the kernel.
        steps: Steps of a whole sum.
        groups: Number of groups; further rows have no sum.
        index: Index of the tile.
    """
    panel = count[0] * tiles.panel
    offset = jax.lax.rem(index, panel)
    width = jnp.int32(tiles.panel)
    column = jax.lax.div(index, panel) * tiles.panel + jax.lax.rem(offset, width)
    at = jax.lax.div(offset, width)
    return at, column * tiles.step, jnp.where(rows[at, 0] < groups, steps, 0)


def scratch(
    tiles: GroupedTiles, dtype: Any, out_dtype: Any, rhs: tuple[int, int]
) -> tuple[Any, ...]:
    """Return slots of both operands, staging of results, `full` and `free`."""
    wide = LINE // jnp.dtype(out_dtype).itemsize
    return (
        shared_memory((tiles.stages, COMPUTING, ROWS, tiles.depth), dtype),
        shared_memory((tiles.stages, *rhs), dtype),
        shared_memory((COMPUTING, 2, ROWS, wide), out_dtype),
        plgpu.SMEM((COMPUTING, ROWS, wide), out_dtype),
        # Each computing warpgroup's part of the left operand, and the right one.
        plgpu.Barrier(num_arrivals=COMPUTING + 1, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=tiles.stages),
    )


def section_of(steps: int, blocks: int, dtype: Any) -> int:
    """Return the steps whose sum is left to WGMMA before it is scaled and moved.

    Args:
        steps: Steps of the whole sum.
        blocks: Number of blocks with their own scales; 0 without.
        dtype: Dtype of the factors.
    """
    section = steps // max(1, blocks)
    if jnp.dtype(dtype).itemsize > 1 or jnp.issubdtype(dtype, jnp.integer):
        return section
    most = min(section, FLOAT8_PRODUCTS // LINE)
    return next(x for x in range(most, 0, -1) if section % x == 0)


def reason_against(
    rows: Any, other_rows: Any, block_size: int | None, *, is_contraction: bool
) -> str | None:
    """Return why these kernels do not take two factors; None where they do.

    Args:
        rows: Dtype of the first factor.
        other_rows: Dtype of the second factor.
        block_size: Length of the sums between scales; None where there is one block.
        is_contraction: Whether the sum runs over rows.
    """
    rows = jnp.dtype(rows)
    other_rows = jnp.dtype(other_rows)
    is_integer = jnp.issubdtype(rows, jnp.integer)
    if rows.itemsize > 2:
        return f"WGMMA kernels take numbers of 16 and 8 bits, not {rows.name}"
    if is_contraction:
        return "sums over rows of int8 are exact in Triton alone" if is_integer else None
    depth = LINE // rows.itemsize
    if block_size is None or block_size % depth == 0:
        return None
    if block_size % (LINE // 2):
        return f"blocks of {block_size} are no multiple of {LINE // 2}"
    return None if not is_integer or block_size <= EXACT_PRODUCTS else _inexact(block_size)


def _inexact(block_size: int) -> str:
    return f"blocks of {block_size} are no multiple of {LINE}, and too long to sum in bfloat16"
