# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which rows of which group every tile of the GPU kernels has, from the sizes, on the device.

A tile is `tile` consecutive rows. Those of a group begin at its first row, rounded down to a
multiple of 8 (TMA wants that), and follow each other to its last; the first and the last may hold
rows of neighbours, which they neither count nor write. What stands past the last group is a group
more, whose rows are written as 0. So a group without rows has no tile, and the number of tiles is
known on the device alone: a kernel runs through as many as there are.

    tiles of a group    ceil((rows + start mod 8) / tile), 0 where it has none

Tiles that would end behind the last row slide back: no tile reads or writes what is not there.

It is arithmetic on a few hundred integers, which XLA fuses to a handful of small kernels.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int

ALIGNED = 8
"""Rows: where a tile may begin."""


class Spans(NamedTuple):
    """First row, and last row + 1, of every group, the group past the last one included."""

    starts: Int[Array, " G+1"]
    ends: Int[Array, " G+1"]


class RowTiles(NamedTuple):
    """The list of tiles."""

    tiles: Int[Array, "T 4"]
    """Group (G: past the last), first row, and of the own rows the first and the last + 1, counted
    from the tile's first row."""
    count: Int[Array, " 1"]
    """How many of them there are; the others mean nothing."""


def spans_of(num_rows: int, group_sizes: Int[Array, " G"]) -> Spans:
    """Of rows sorted by group; sizes above the rows are cut at the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends])
    return Spans(starts, jnp.concatenate([ends, jnp.full_like(ends[:1], num_rows)]))


def row_tiles(num_rows: int, group_sizes: Int[Array, " G"], tile: int) -> RowTiles:
    """The tiles of `num_rows` rows, which are at least one tile and a multiple of 8."""
    starts, ends = spans_of(num_rows, group_sizes)
    aligned = starts // ALIGNED * ALIGNED
    counts = jnp.where(ends > starts, -(-(ends - aligned) // tile), 0)
    last = jnp.cumsum(counts)
    most = (num_rows + starts.shape[0] * (tile + ALIGNED - 2)) // tile
    index = jnp.arange(most, dtype=jnp.int32)
    # Past the last tile this is a group too many, whose values are taken from the last one.
    group = jnp.sum(index[:, None] >= last[None, :], axis=1, dtype=jnp.int32)
    of = jnp.minimum(group, starts.shape[0] - 1)
    begin = aligned[of] + (index - (last - counts)[of]) * tile
    first = jnp.clip(begin, 0, num_rows - tile)
    low = jnp.maximum(begin, starts[of]) - first
    high = jnp.minimum(begin + tile, ends[of]) - first
    return RowTiles(jnp.stack([of, first, low, high], axis=1).astype(jnp.int32), last[-1:])
