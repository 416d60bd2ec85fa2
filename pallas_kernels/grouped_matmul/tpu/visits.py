# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which tile of rows meets which group's matrix, in which order: the grid of the TPU kernels.

Rows are cut into tiles wherever groups begin. A visit is one tile with one group; a tile with two
groups has two, one after the other, so that it stays in memory between them, as a group's matrix
stays while its tiles pass by (the order of megablox, arXiv 2211.15841, section 5). The number of
visits depends on the sizes of groups, the grid does not, and has room for the worst case:

    tiles + min(G, R) - 1     `visit_rows`: every group begins in the middle of a tile
    tiles + G - 1             `visit_groups`: empty groups have a visit too, so that they become 0

What is left over comes last, copies nothing and computes nothing. In `visit_rows` it first goes
through the tiles past the last group, where the results are 0 and no row is read.

To add a kernel: choose one of the two, and hand `Visits` over as scalars that are read beforehand.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int


class Visits(NamedTuple):
    """One entry per visit, all in scalar memory."""

    group: Int[Array, " v"]
    """Whose matrix."""
    read: Int[Array, " v"]
    """Which tile of rows is read; past the last group still the last one with rows."""
    write: Int[Array, " v"]
    """Which tile of rows the results belong to."""
    low: Int[Array, " v"]
    """First row of the group within the tile."""
    high: Int[Array, " v"]
    """Where its rows end within the tile; not above `low` where there is nothing to do."""

    def as_read(self) -> list[Array]:
        """As a kernel takes them."""
        return list(self)

    @property
    def number(self) -> int:
        """Of visits, used or not."""
        return self.group.shape[0]


def visit_rows(group_sizes: Int[Array, " G"], num_rows: int, tile: int) -> Visits:
    """Every tile of rows, once for each group in it, or once where there is none.

    Args:
        group_sizes: As in `grouped_matmul`; what is above `num_rows` in sum is left out.
        num_rows: R, at least 1.
        tile: Rows of a tile.
    """
    number = -(-num_rows // tile) + min(group_sizes.shape[0], num_rows) - 1
    return _visits(group_sizes, num_rows, tile, number, least=0)


def visit_groups(group_sizes: Int[Array, " G"], num_rows: int, tile: int) -> Visits:
    """Every group, once for each tile in which it has rows, or once where it has none.

    Args:
        group_sizes: As in `grouped_matmul`; what is above `num_rows` in sum is left out.
        num_rows: R, at least 1.
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
    # The last group that has a visit also has those that are left over.
    last = jnp.sum(bounds < bounds[-1], dtype=jnp.int32)
    group = jnp.sum(bounds[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, last)
    is_used = index < bounds[-1]
    with_rows = -(-ends[-1] // tile)
    final = jnp.maximum(with_rows - 1, 0)
    own = first[group] + index - (bounds - counts)[group]
    read = jnp.where(is_used, own, final)
    past = jnp.minimum(with_rows + index - bounds[-1], tiles - 1)
    low, high = (jnp.clip(edge[group] - own * tile, 0, tile) for edge in (starts, ends))
    none = jnp.zeros_like(low)
    return Visits(
        group=group,
        read=read,
        write=jnp.where(is_used, own, past),
        low=jnp.where(is_used, low, none),
        high=jnp.where(is_used, high, none),
    )
