# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lays out the rows of each group for the `xla` implementations of grouped products.

    head       the first C rows of every group, gathered to [G C k] and multiplied in one batched
               product; C is a little more than R / G, so balanced groups are wholly in the head
    overflow   the rows of a group beyond C, in blocks, in a loop that runs as often as the sizes of
               this call need: not at all where no group is larger than C

A group that overflows has more than C rows, and blocks have at most C, so that the last block of a
group slides back until it ends with the group: no block reads or writes the rows of another group.
Every shape is static, and nothing is scattered.

To tune it for another machine, measure SLACK, MIN_HEADS and BLOCKS with balanced and with skewed
groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Int, Shaped

# Rows beyond R / G in the head, as a fraction: a router's counts scatter by a few percent around
# the mean, and a block of overflow costs more than the head's extra rows.
SLACK = 1 / 16
# Rows in one block of overflow, descending. A block of any size costs about 100 rows more, because
# the matrix is copied and packed again: one block of the next larger size replaces two blocks, and
# slides back over rows of the block before it.
BLOCKS = (512, 256, 128)
# Smallest heads, ascending: the first that has half as many rows again as a group on average. The
# counts of small groups scatter more. Where every matrix is read for a few rows (as in decoding), a
# head of 32 rows takes twice as long as one of 16, and three times as long as one of 8.
MIN_HEADS = (8, 16, 32)
MIN_ROOM = 3 / 2


class Layout(NamedTuple):
    """Place of every row, from the sizes of the groups."""

    starts: Int[Array, " G"]
    """First row of every group."""
    sizes: Int[Array, " G"]
    """Rows of every group."""
    ids: Int[Array, " R"]
    """Group of every row, G past the last group."""
    slots: Int[Array, "G C"]
    """Row at every place of the head, clamped to the last row."""
    is_filled: Bool[Array, "G C 1"]
    """Whether that row belongs to the group."""
    has_group: Bool[Array, "R 1"]
    """Whether the row belongs to any group."""

    def head_of(self, rows: Shaped[Array, "R k"]) -> Shaped[Array, "G C k"]:
        """Gather rows to their places in the head, 0 where there is none."""
        return jnp.where(self.is_filled, rows[self.slots], jnp.zeros((), rows.dtype))

    def rows_of(self, head: Shaped[Array, "G C n"]) -> Shaped[Array, "R n"]:
        """Undo `head_of`: 0 for rows without a group, undefined for the overflow."""
        num_groups, capacity, width = head.shape
        group = jnp.minimum(self.ids, num_groups - 1)
        place = jnp.minimum(jnp.arange(self.ids.shape[0]) - self.starts[group], capacity - 1)
        rows = head.reshape(num_groups * capacity, width)[group * capacity + place]
        return jnp.where(self.has_group, rows, jnp.zeros_like(rows))


def head_size(num_rows: int, num_groups: int) -> int:
    """Return the rows of every group in the head (C), at most all rows.

    Args:
        num_rows: R.
        num_groups: G.
    """
    mean = num_rows / num_groups
    least = next((rows for rows in MIN_HEADS if rows >= mean * MIN_ROOM), MIN_HEADS[-1])
    return min(num_rows, max(least, int(mean * (1 + SLACK))))


def lay_out(num_rows: int, group_sizes: Int[Array, " G"]) -> Layout:
    """Return the layout of `num_rows` rows in groups of these sizes."""
    # On a GPU XLA does not compile the loops over blocks where it knows their lengths.
    group_sizes = jax.lax.optimization_barrier(group_sizes)
    num_groups = group_sizes.shape[0]
    head = head_size(num_rows, num_groups)
    ends = jnp.minimum(jnp.cumsum(group_sizes), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = ends - starts
    ids = jnp.searchsorted(ends, jnp.arange(num_rows), side="right")
    places = jnp.arange(head)[None]
    return Layout(
        starts=starts,
        sizes=sizes,
        ids=ids,
        slots=jnp.minimum(starts[:, None] + places, num_rows - 1),
        is_filled=(places < sizes[:, None])[:, :, None],
        has_group=(ids < num_groups)[:, None],
    )


class RowBlock(NamedTuple):
    """Consecutive rows of one group."""

    start: Int[Array, ""]
    size: int
    num_seen: Int[Array, ""]
    """Rows at its beginning that belong to the block before as well."""

    def of(self, rows: Shaped[Array, "R k"]) -> Shaped[Array, "size k"]:
        """Return the rows of the block."""
        return jax.lax.dynamic_slice_in_dim(rows, self.start, self.size)

    def new_of(self, rows: Shaped[Array, "R k"]) -> Shaped[Array, "size k"]:
        """Return the rows of the block, 0 for those of the block before."""
        is_new = (jnp.arange(self.size) >= self.num_seen)[:, None]
        block = self.of(rows)
        return jnp.where(is_new, block, jnp.zeros_like(block))

    def put(self, rows: Shaped[Array, "R n"], block: Shaped[Array, "size n"]) -> Array:
        """Return rows with those of the block replaced."""
        return jax.lax.dynamic_update_slice_in_dim(rows, block, self.start, 0)


def matrix_of(weights: Shaped[Array, "G k n"], group: Int[Array, ""]) -> Shaped[Array, "1 k n"]:
    """Return the matrix of one group."""
    return jax.lax.dynamic_slice_in_dim(weights, group, 1)


def add_to_matrix(total: Array, group: Int[Array, ""], part: Shaped[Array, "1 k n"]) -> Array:
    """Add to the matrix of one group in place."""
    new = matrix_of(total, group) + part
    return jax.lax.dynamic_update_slice_in_dim(total, new, group, 0)


def over_blocks(layout: Layout, body: Callable[..., Any], carry: Any) -> Any:
    """Call body(carry, group, block) for every block of overflow; return the last carry."""
    head = layout.slots.shape[1]
    if head == layout.ids.shape[0]:  # it holds all rows, of whichever group
        return carry
    done = jnp.minimum(layout.sizes, head)
    blocks = [min(block, head) for block in BLOCKS]
    for block, next_block in zip(blocks, [*blocks[1:], 0], strict=True):
        remaining = jnp.maximum(layout.sizes - done - next_block, 0)
        counts = -(-remaining // block)
        ends = jnp.cumsum(counts)

        def step(i, carry, block=block, counts=counts, ends=ends, done=done):
            group = jnp.searchsorted(ends, i, side="right")
            new = done[group] + (i - ends[group] + counts[group]) * block
            first = jnp.minimum(new, layout.sizes[group] - block)
            start = layout.starts[group] + first
            return body(carry, group, RowBlock(start, block, new - first))

        carry = jax.lax.fori_loop(0, ends[-1], step, carry)
        done = jnp.minimum(done + counts * block, layout.sizes)
    return carry
