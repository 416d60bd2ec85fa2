# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Copies single rows of an array in device memory into a tile of a TPU kernel, by index.

    tile[r] = rows[sources[first + r]]        for the rows of the visit's group alone

Each row is a copy of its own, started one visit ahead, so that the copies of a visit run while the
visit before is computed; the tile has two buffers. Rows are copied again for every tile of columns.

A row of 16-bit values is no unit that a TPU can copy: two rows share 32-bit words (Mosaic: "Offsets
along tiled dimensions must be aligned to tiles", 8 rows). `words_of` makes words of two values of
the same row, half a block of columns apart, in one pass over the array; the kernel takes them apart
with a shift and a mask. Rows of 32-bit values are copied as they are.

The starts and waits are instructions of the core that multiplies, for each row: what they cost has
not been measured on a TPU. A layer of OLMoE copies each of 131,072 rows nine times, whole or in
halves, and spares 3.2 GB of traffic: on a v5e it is faster if a start and its wait take less than
3 ns, three cycles. What it surely saves is memory.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array, Int, Shaped

PAIR = 256
"""Columns of the smallest block: two vectors of lanes."""


def takes_rows(rows: Any) -> bool:
    """Return whether single rows can be copied.

    Args:
        rows: Array [T k], or its shape and dtype.
    """
    is_taken = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize in (2, 4)
    return is_taken and rows.shape[-1] % PAIR == 0


def even_block(width: int, limit: int) -> int:
    """Return the largest block of columns up to a limit that divides the width.

    Args:
        width: Columns k.
        limit: Columns of a block, at most; the smallest block may be larger.
    """
    if width <= limit:
        return width
    return max(size for size in range(PAIR, max(limit, PAIR) + 1, PAIR) if width % size == 0)


def words_of(rows: Shaped[Array, "T k"], block: int) -> Shaped[Array, "T w"]:
    """Return the rows in 32-bit words, w = k / 2 of them for values of 16 bits.

    Args:
        rows: Values of 16 or 32 bits.
        block: Columns of a block, which are w k / block consecutive words.
    """
    if rows.dtype.itemsize == 4:
        return rows

    def bits(start: int) -> Array:
        part = jax.lax.slice_in_dim(rows, start, start + block // 2, axis=1)
        return jax.lax.bitcast_convert_type(part, jnp.uint16).astype(jnp.uint32)

    # Slices of whole lanes: XLA would copy an array that is reshaped into blocks.
    starts = range(0, rows.shape[1], block)
    return jnp.concatenate([bits(at) | (bits(at + block // 2) << 16) for at in starts], axis=1)


def values_of(words: Shaped[Array, "r w"], dtype: Any) -> Shaped[Array, "r k"]:
    """Return one block of columns, the inverse of `words_of`; in a kernel.

    Args:
        words: Words of the block.
        dtype: Dtype of the rows.
    """
    if jnp.dtype(dtype).itemsize == 4:
        return words
    if dtype == jnp.bfloat16:  # the upper half of a float32
        parts = (words << 16, words & jnp.uint32(0xFFFF0000))
        parts = (jax.lax.bitcast_convert_type(part, jnp.float32) for part in parts)
    else:
        parts = ((words & jnp.uint32(0xFFFF)).astype(jnp.uint16), (words >> 16).astype(jnp.uint16))
        parts = (jax.lax.bitcast_convert_type(part, dtype) for part in parts)
    return jnp.concatenate([part.astype(dtype) for part in parts], axis=1)


def indices_by_tile(sources: Int[Array, " R"], tile: int) -> Int[Array, "tiles 1 r"]:
    """Return the sources cut into tiles, 0 beyond the last row.

    Args:
        sources: Row of the array for each row of the operation.
        tile: Rows of a tile.
    """
    number = -(-sources.shape[0] // tile)
    padded = jnp.pad(sources.astype(jnp.int32), (0, number * tile - sources.shape[0]))
    return padded.reshape(number, 1, tile)


def index_specs(tile: int, visit_of: Callable[..., Any], num_visits: int) -> list[pl.BlockSpec]:
    """Return the blocks in scalar memory of a visit and of the one after it.

    Args:
        tile: Rows of a tile.
        visit_of: (grid indices and prefetched scalars) -> number of the visit, and the tiles of
            rows by visit.
        num_visits: Number of visits.
    """

    def spec(ahead: int) -> pl.BlockSpec:
        def index(*at: Any) -> Any:
            visit, tiles = visit_of(*at)
            return tiles[jnp.minimum(visit + ahead, num_visits - 1)], 0, 0

        return pl.BlockSpec((None, 1, tile), index, memory_space=pltpu.SMEM)

    return [spec(0), spec(1)]


class GridPlace(NamedTuple):
    """Place in the grid."""

    visit: Any
    part: Any
    """Part of the sum."""
    num_visits: Any
    num_parts: int = 1


class RowCopies(NamedTuple):
    """The copies of a kernel."""

    words: Any
    """Reference to the rows [T w] in device memory."""
    tiles: Any
    """Two buffers [2 r b], b words of a block."""
    semaphores: Any
    """One for each buffer."""

    def advance(
        self, sources: Sequence[Any], step: GridPlace, low: Any, high: Any, block: Any = 0
    ) -> Any:
        """Start the copies of the next step, and return the tile of this one, [r b].

        Steps of one tile of columns follow each other on one core; the first has no step before it.

        Args:
            sources: References to the sources of the rows of this visit and the next, [1 r] each.
            step: This step.
            low: First row of each visit in its tile.
            high: Last row of each visit + 1.
            block: Number of the block of columns of part 0.
        """
        visit = step.visit
        number = visit * step.num_parts + step.part
        slot = number % 2

        @pl.when(number == 0)
        def _():
            self._start(sources[0], slot, low[visit], high[visit], block)

        @pl.when(step.part + 1 < step.num_parts)
        def _():
            self._start(sources[0], 1 - slot, low[visit], high[visit], block + step.part + 1)

        @pl.when((step.part + 1 == step.num_parts) & (visit + 1 < step.num_visits))
        def _():
            self._start(sources[1], 1 - slot, low[visit + 1], high[visit + 1], block)

        self._over(low[visit], high[visit], lambda row: self._copy(0, row, slot, 0).wait())
        return self.tiles.at[slot]

    def _start(self, sources: Any, slot: Any, low: Any, high: Any, block: Any) -> None:
        self._over(low, high, lambda row: self._copy(sources[0, row], row, slot, block).start())

    def _over(self, low: Any, high: Any, act: Callable[[Any], None]) -> None:
        def body(row: Any, carry: Any) -> Any:
            act(row)
            return carry

        jax.lax.fori_loop(low, high, body, jnp.int32(0))

    def _copy(self, source: Any, row: Any, slot: Any, block: Any) -> Any:
        width = self.tiles.shape[2]
        start = pl.multiple_of(block * width, width)
        return pltpu.make_async_copy(
            self.words.at[source, pl.ds(start, width)],
            self.tiles.at[slot, row],
            self.semaphores.at[slot],
        )


def scratch_of(rows: int, block: int, dtype: Any) -> list[Any]:
    """Return the memory of the copies: two buffers and their semaphores.

    Args:
        rows: Rows of a tile.
        block: Columns of a block.
        dtype: Dtype of the rows.
    """
    is_wide = jnp.dtype(dtype).itemsize == 4
    words = (2, rows, block if is_wide else block // 2)
    return [
        pltpu.VMEM(words, dtype if is_wide else jnp.uint32),
        pltpu.SemaphoreType.DMA((2,)),
    ]
