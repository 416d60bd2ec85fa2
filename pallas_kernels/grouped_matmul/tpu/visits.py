# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs tiles of rows with group matrices: the grid of the TPU kernels.

Rows are cut into tiles regardless of groups. A visit is one tile with one group; a tile with two
groups has two consecutive visits, so that it stays in memory between them, as a group's matrix
stays over its tiles (the order of megablox, arXiv 2211.15841, section 5). The number of visits
depends on the group sizes; the grid has the worst case:

    tiles + min(G, R) - 1     `visit_rows`: every group begins in the middle of a tile
    tiles + G - 1             `visit_groups`: empty groups have a visit too, and become 0

Unused visits come last, copy nothing and compute nothing. In `visit_rows` they first go through the
tiles past the last group, whose results are 0 and whose rows are not read.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int


class Visits(NamedTuple):
    """One entry per visit, all in scalar memory."""

    group: Int[Array, " v"]
    """Group whose matrix is used."""
    read: Int[Array, " v"]
    """Tile of rows that is read; past the last group the last one with rows."""
    write: Int[Array, " v"]
    """Tile of rows that the results belong to."""
    low: Int[Array, " v"]
    """First row of the group within the tile."""
    high: Int[Array, " v"]
    """Last row of the group within the tile + 1; not above `low` if there is none."""

    def as_read(self) -> list[Array]:
        """Return the arrays in the order of the kernels."""
        return list(self)

    @property
    def number(self) -> int:
        """Number of visits, used or not."""
        return self.group.shape[0]


def visit_rows(group_sizes: Int[Array, " G"], num_rows: int, tile: int) -> Visits:
    """Return every tile of rows, once per group in it, or once where there is none.

    Args:
        group_sizes: Rows of each group; groups are cut at `num_rows`.
        num_rows: Number of rows R, at least 1.
        tile: Rows of a tile.
    """
    number = -(-num_rows // tile) + min(group_sizes.shape[0], num_rows) - 1
    return _visits(group_sizes, num_rows, tile, number, least=0)


def visit_groups(group_sizes: Int[Array, " G"], num_rows: int, tile: int) -> Visits:
    """Return every group, once per tile in which it has rows, or once where it has none.

    Args:
        group_sizes: Rows of each group; groups are cut at `num_rows`.
        num_rows: Number of rows R, at least 1.
        tile: Rows of a tile.
    """
    number = -(-num_rows // tile) + group_sizes.shape[0] - 1
    return _visits(group_sizes, num_rows, tile, number, least=1)


def _visits(
    group_sizes: Int[Array, " G"], num_rows: int, tile: int, number: int, least: int
) -> Visits:
    tiles = -(-num_rows // tile)
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    first = jnp.minimum(starts // tile, tiles - 1)
    counts = jnp.where(ends > starts, -(-ends // tile) - first, least)
    bounds = jnp.cumsum(counts)
    index = jnp.arange(number, dtype=jnp.int32)
    # The last group with a visit also has the unused ones.
    last = jnp.sum(bounds < bounds[-1], dtype=jnp.int32)
    group = jnp.sum(bounds[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, last)
    is_used = index < bounds[-1]
    with_rows = -(-ends[-1] // tile)
    final = jnp.maximum(with_rows - 1, 0)
    block_index = first[group] + index - (bounds - counts)[group]
    read = jnp.where(is_used, block_index, final)
    past = jnp.minimum(with_rows + index - bounds[-1], tiles - 1)
    low, high = (jnp.clip(edge[group] - block_index * tile, 0, tile) for edge in (starts, ends))
    none = jnp.zeros_like(low)
    return Visits(
        group=group,
        read=read,
        write=jnp.where(is_used, block_index, past),
        low=jnp.where(is_used, low, none),
        high=jnp.where(is_used, high, none),
    )
