# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the tiles of rows of the GPU kernels from the group sizes, on the device.

A tile is `tile` consecutive rows. Those of a group begin at its first row, rounded down to a
multiple of 8 (for TMA), and follow each other to its last; the first and the last may hold rows of
neighbours, which they neither count nor write. Rows past the last group form one more group, whose
rows are written as 0. An empty group has no tile, and the number of tiles is known on the device
only: a kernel runs through as many as there are.

    tiles of a group    ceil((rows + start mod 8) / tile), 0 where it has none

Tiles that would pass the last row slide back.

It is arithmetic on a few hundred integers, which XLA fuses to a few small kernels.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int

ALIGNED = 8
"""Multiple of rows at which a tile may begin."""


class Spans(NamedTuple):
    """First row, and last row + 1, of every group, the group past the last one included."""

    starts: Int[Array, " G+1"]
    ends: Int[Array, " G+1"]


class RowTiles(NamedTuple):
    """List of tiles."""

    tiles: Int[Array, "T 4"]
    """Group (G: past the last), first row, and the first and the last + 1 of the own rows, counted
    from the tile's first row.
    """
    count: Int[Array, " 1"]
    """Number of valid entries."""


def spans_of(num_rows: int, group_sizes: Int[Array, " G"]) -> Spans:
    """Return the spans of rows sorted by group, cut at the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    return Spans(starts, jnp.concatenate([ends, jnp.full_like(ends[:1], num_rows)]))


def row_tiles(num_rows: int, group_sizes: Int[Array, " G"], tile: int) -> RowTiles:
    """Return the tiles of `num_rows` rows, at least one tile and a multiple of 8."""
    starts, ends = spans_of(num_rows, group_sizes)
    aligned = starts // ALIGNED * ALIGNED
    counts = jnp.where(ends > starts, -(-(ends - aligned) // tile), 0)
    last = jnp.cumsum(counts)
    most = (num_rows + starts.shape[0] * (tile + ALIGNED - 2)) // tile
    index = jnp.arange(most, dtype=jnp.int32)
    # Past the last tile the group is out of range; its values are those of the last one.
    group = jnp.sum(index[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    of = jnp.minimum(group, starts.shape[0] - 1)
    begin = aligned[of] + (index - (last - counts)[of]) * tile
    first = jnp.clip(begin, 0, num_rows - tile)
    low = jnp.maximum(begin, starts[of]) - first
    high = jnp.minimum(begin + tile, ends[of]) - first
    return RowTiles(jnp.stack([of, first, low, high], axis=1).astype(jnp.int32), last[-1:])
