# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the grid of the TPU kernels of attention: the blocks of a step, and whether it computes.

    by="rows"   (B, M, block of rows, step): a block of rows meets its keys, one block a step
    by="keys"   (B, M, block of keys, step): a block of keys meets its rows

The other side's block of a step is first + step; the range (first, last) of the current block is in
scalar memory. Beyond last the block stays the same, so that nothing is copied again, and the step
computes nothing.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.flash_attention.mask import Rules, sees
from pallas_kernels.flash_attention.tpu import tiles
from pallas_kernels.flash_attention.tpu.blocks import (
    RECORD,
    BlockPlan,
    Bounds,
    TileSizes,
    all_see,
    may_see,
)

Side = Literal["rows", "keys"]


class Grid(NamedTuple):
    """Static grid of a kernel."""

    sizes: TileSizes
    by: Side
    steps: int
    num_marks: int
    is_shared: bool
    """Whether all sequences have the same marks."""

    @classmethod
    def of(cls, sizes: TileSizes, plan: BlockPlan, by: Side) -> "Grid":
        """Return the grid of a kernel that keeps the sums of blocks of rows, or of keys."""
        steps = plan.key_steps if by == "rows" else plan.row_steps
        return cls(sizes, by, steps, plan.num_marks, plan.is_shared)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Grid for `pallas_call`."""
        blocks = self.sizes.row_blocks if self.by == "rows" else self.sizes.key_blocks
        return self.sizes.b, self.sizes.m, blocks, self.steps

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        """Compiler parameters; only the steps depend on each other."""
        return pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        )

    def cost(self, products: int, itemsize: int) -> pl.CostEstimate:
        """Return the cost for XLA's scheduler, as if every step computed."""
        z = self.sizes
        pairs = z.b * z.m * self.shape[2] * self.steps * z.row_block * z.key_block
        row_bytes = z.b * z.m * z.rows * (z.h + z.hv) * itemsize
        key_bytes = z.b * z.m * z.keys * (z.h + z.hv) * itemsize
        return pl.CostEstimate(
            flops=products * pairs * (z.h + z.hv),
            transcendentals=pairs,
            bytes_accessed=row_bytes + key_bytes,
        )

    # Position of a step. Index maps are given the indices; kernels read them.

    def blocks(self, b: Any, at: Any, step: Any, row_bounds: Any, key_bounds: Any) -> Any:
        """Return the blocks (of rows, of keys) of a step, and whether it is within the range."""
        bounds = row_bounds if self.by == "rows" else key_bounds
        start = self.record(b, at, self.by)
        first = bounds[start + 4]
        last = bounds[start + 5]
        column = jnp.clip(first + step, 0, jnp.maximum(last, 0))
        pair = (at, column) if self.by == "rows" else (column, at)
        return *pair, first + step <= last

    def record(self, b: Any, at: Any, side: Side) -> Any:
        """Return the start of the record of a block."""
        number = self.sizes.row_blocks if side == "rows" else self.sizes.key_blocks
        return (at if self.is_shared else b * number + at) * RECORD

    @property
    def is_first(self) -> Any:
        """Whether this is the first step of the current block."""
        return pl.program_id(3) == 0

    @property
    def is_last(self) -> Any:
        """Whether this is the last step of the current block."""
        return pl.program_id(3) == self.steps - 1

    # Operands.

    def rows(self, width: int) -> pl.BlockSpec:
        """Return the spec of [B M R width]."""

        def index(b: Any, m: Any, at: Any, step: Any, *bounds: Any) -> Any:
            return b, m, self.blocks(b, at, step, *bounds)[0], 0

        return pl.BlockSpec((None, None, self.sizes.row_block, width), index)

    def keys(self, width: int) -> pl.BlockSpec:
        """Return the spec of [B M U width]."""

        def index(b: Any, m: Any, at: Any, step: Any, *bounds: Any) -> Any:
            return b, m, self.blocks(b, at, step, *bounds)[1], 0

        return pl.BlockSpec((None, None, self.sizes.key_block, width), index)

    def statistics(self) -> pl.BlockSpec:
        """Return the spec of [B M blocks 1 rows], one number per row."""

        def index(b: Any, m: Any, at: Any, step: Any, *bounds: Any) -> Any:
            return b, m, self.blocks(b, at, step, *bounds)[0], 0, 0

        return pl.BlockSpec((None, None, None, 1, self.sizes.row_block), index)

    def row_marks(self) -> pl.BlockSpec:
        """Return the spec of [b' blocks c rows]."""

        def index(b: Any, m: Any, at: Any, step: Any, *bounds: Any) -> Any:
            del m
            return 0 if self.is_shared else b, self.blocks(b, at, step, *bounds)[0], 0, 0

        return pl.BlockSpec((None, None, self.num_marks, self.sizes.row_block), index)

    def key_marks(self) -> pl.BlockSpec:
        """Return the spec of [b' blocks c keys]."""

        def index(b: Any, m: Any, at: Any, step: Any, *bounds: Any) -> Any:
            del m
            return 0 if self.is_shared else b, self.blocks(b, at, step, *bounds)[1], 0, 0

        return pl.BlockSpec((None, None, self.num_marks, self.sizes.key_block), index)

    def keep_columns(self, columns: Any, marks: Any) -> None:
        """Write the marks [c length] of the current block as columns [c length LANES]."""
        for i in range(self.num_marks):
            columns[i] = tiles.column(marks[i : i + 1, :])


def mask(grid: Grid, rules: Rules, columns: Any, marks: Any, key_block: Any) -> Any:
    """Return the mask of a tile: [rows keys], or [keys rows] where the grid is by keys, or None.

    Args:
        grid: Grid of the kernel.
        rules: Mask rules.
        columns: Marks of the current block, as columns.
        marks: Marks of the other side's block, as rows.
        key_block: Index of the block of keys, None where no mask is needed.
    """
    if key_block is None:
        return None
    z = grid.sizes
    down = [columns[i][:, :1] for i in range(grid.num_marks)]
    across = [marks[i : i + 1, :] for i in range(grid.num_marks)]
    rows, keys = (down, across) if grid.by == "rows" else (across, down)
    segments = (rows[1], keys[1]) if grid.num_marks == 2 else (None, None)
    is_visible = sees(rules, rows[0], keys[0], *segments)
    if z.keys > z.u:
        axis = 1 if grid.by == "rows" else 0
        index = jax.lax.broadcasted_iota(jnp.int32, is_visible.shape, axis)
        is_visible = is_visible & (index < z.u - key_block * z.key_block)
    return is_visible


def when_seen(
    grid: Grid,
    rules: Rules,
    row_bounds: Any,
    key_bounds: Any,
    compute: Callable[[Any], None],
) -> None:
    """Run `compute` in the steps whose tile is not hidden.

    Args:
        grid: Grid of the kernel.
        rules: Mask rules.
        row_bounds: Records of the blocks of rows, in scalar memory.
        key_bounds: Records of the blocks of keys, in scalar memory.
        compute: Called with the index of the block of keys, or with None where no mask is needed.
    """
    b = pl.program_id(0)
    at = pl.program_id(2)
    step = pl.program_id(3)
    row_block, key_block, is_within = grid.blocks(b, at, step, row_bounds, key_bounds)
    start = grid.record(b, row_block, "rows")
    rows = Bounds(*(row_bounds[start + i] for i in range(4)))
    start = grid.record(b, key_block, "keys")
    keys = Bounds(*(key_bounds[start + i] for i in range(4)))
    is_seen = is_within & may_see(rules, rows, keys)
    is_open = all_see(rules, rows, keys)
    z = grid.sizes
    if z.keys > z.u:
        is_open = is_open & (key_block < z.key_blocks - 1)

    @pl.when(is_seen & is_open)
    def _():
        compute(None)

    @pl.when(is_seen & jnp.logical_not(is_open))
    def _():
        compute(key_block)
