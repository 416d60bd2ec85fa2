# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rotates K and V inside one TPU kernel: the parts shared by both passes of a ring.

Rank r has in step s the keys of rank r - s, and sends them to r + 1 meanwhile. Heads of K and V
rotate one after another, so that the arrays of a head's queries stay in VMEM from its first step to
its last.

    for head in heads:              turn t = head * N + step
        for step in range(N):       slot t % 2 of two holds the keys of this turn
            start sending the slot's keys to the other slot of the next rank
            for block of queries: all blocks of keys that it sees
            wait until they are sent

**Capacity.** A remote copy has no handshake. The slot of turn t + 1 was that of t - 1, so the
sender of turn t waits for a count on its capacity semaphore, which the receiver signals when it has
both computed with and sent on the keys of turn t - 1. A rank is thus at most one turn ahead of the
next one. The first turn needs no count, because `meet` has synchronised all ranks. A head's own
keys come from this device, one turn ahead, into a slot that no rank sends to.

The tiles to compute follow from the least and largest positions and segments of blocks, of all
ranks, so that any layout works; all of K and V travels. See transfer.py for `meet` and `part`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.flash_attention.mask import Rules, sees
from pallas_kernels.flash_attention.tpu.blocks import (
    RECORD,
    BlockPlan,
    Bounds,
    TileSizes,
    all_see,
    make_plan,
    may_see,
)
from pallas_kernels.flash_attention.tpu.tiles import LANES, column
from pallas_kernels.ring.remote_dma.transfer import collective_id, meet, mesh_place, part

HIDDEN = 0
PARTLY = 1
WHOLLY = 2
"""Visibility of a block of keys for a block of queries."""

BLOCKS_VMEM = 2**24
"""Bytes of VMEM for blocks and scores, as in flash_attention."""


class Shape(NamedTuple):
    """Static part of a kernel; hashable."""

    sizes: TileSizes
    rules: Rules
    ranks: int
    is_shared: bool
    """Whether all sequences have the same marks."""
    num_marks: int
    axes: tuple[str, ...]
    axis_name: str

    @property
    def heads(self) -> int:
        """Number of key heads of all sequences."""
        return self.sizes.b * self.sizes.m

    @property
    def turns(self) -> int:
        """Number of turns of all heads."""
        return self.heads * self.ranks

    def sequence(self, head: Any) -> Any:
        """Return the sequence whose marks a head reads."""
        return 0 if self.is_shared else head // self.sizes.m

    def owner(self, place: Any, step: Any) -> Any:
        """Return the rank whose keys are here in a step."""
        rank = place[self.axes.index(self.axis_name)]
        return jax.lax.rem(rank - step + self.ranks, self.ranks)

    def keys(self, index: Any) -> Any:
        """Return the slice of a block of keys."""
        return pl.ds(pl.multiple_of(index * self.sizes.key_block, LANES), self.sizes.key_block)

    def by_head(self, x: Array) -> Array:
        """Reshape [B M ...] to [heads ...]."""
        return x.reshape(self.heads, *x.shape[2:])

    def from_head(self, x: Array) -> Array:
        """Reshape [heads ...] to [B M ...]."""
        return x.reshape(self.sizes.b, self.sizes.m, *x.shape[1:])

    def compiler_params(self, vmem_bytes: int) -> pltpu.CompilerParams:
        """Return the compiler parameters of a kernel.

        Args:
            vmem_bytes: Bytes that it keeps in VMEM beside blocks and scores.
        """
        return pltpu.CompilerParams(
            dimension_semantics=("arbitrary",) * 3,
            collective_id=collective_id(self.axis_name),
            has_side_effects=True,
            vmem_limit_bytes=vmem_bytes + BLOCKS_VMEM,
        )

    def cost(self, products: int, itemsize: int, is_backward: bool = False) -> pl.CostEstimate:
        """Return the cost for XLA's scheduler and for plans, as if every tile were computed.

        Args:
            products: Number of matrix products per tile.
            itemsize: Bytes of an element of q.
            is_backward: Whether float32 sums travel too.
        """
        z = self.sizes
        widths = self.sizes.h + self.sizes.hv
        pairs = self.turns * z.rows * z.keys
        sent = (self.ranks - 1) * itemsize + (4 * self.ranks if is_backward else 0)
        return pl.CostEstimate(
            flops=products * pairs * widths,
            transcendentals=pairs,
            bytes_accessed=self.heads * (self.ranks * z.rows + z.keys) * widths * itemsize,
            remote_bytes_transferred=self.heads * z.keys * widths * sent,
        )

    # Operands. The grid is (heads, steps, blocks of queries).

    @property
    def grid(self) -> tuple[int, int, int]:
        """Grid of both passes: (heads, steps, blocks of queries)."""
        return self.heads, self.ranks, self.sizes.row_blocks

    def rows(self, width: int) -> pl.BlockSpec:
        """Return the spec of [heads R width]."""
        return pl.BlockSpec(
            (1, self.sizes.row_block, width), lambda head, step, block, *_: (head, block, 0)
        )

    def statistics(self) -> pl.BlockSpec:
        """Return the spec of [heads blocks 1 rows], one number per row."""
        return pl.BlockSpec(
            (None, None, 1, self.sizes.row_block),
            lambda head, step, block, *_: (head, block, 0, 0),
        )

    def row_marks(self) -> pl.BlockSpec:
        """Return the spec of [b' blocks c rows]."""
        return pl.BlockSpec(
            (None, None, self.num_marks, self.sizes.row_block),
            lambda head, step, block, *_: (self.sequence(head), block, 0, 0),
        )

    def key_marks(self) -> pl.BlockSpec:
        """Return the spec of [ranks b' blocks c keys], all blocks."""
        return pl.BlockSpec(
            (None, None, self.sizes.key_blocks, self.num_marks, self.sizes.key_block),
            lambda head, step, block, place, _: (
                self.owner(place, step),
                self.sequence(head),
                0,
                0,
                0,
            ),
        )

    def finished_block(self, step: Any, block: Any) -> Any:
        """Return the block of queries that is written.

        Before the last step it stays the first one, which is not written.
        """
        return jnp.where(step == self.ranks - 1, block, 0)

    def slots(self, dtype: Any) -> list[Any]:
        """Return scratch: two slots of keys, two of values, and the semaphores of `KeyTravel`."""
        return [
            pltpu.VMEM((2, self.sizes.keys, self.sizes.h), dtype),
            pltpu.VMEM((2, self.sizes.keys, self.sizes.hv), dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.REGULAR,
            pltpu.SemaphoreType.REGULAR,
        ]


def prepare(
    operands: AttentionOperands, axis_name: str
) -> tuple[Shape, tuple[Array, Array], tuple[Array, Array]]:
    """Return the static part of a kernel, its scalars (place, visits), and marks of rows and keys.

    Args:
        operands: Arrays of this rank; its positions must be given, for queries and keys alike.
        axis_name: Mesh axis of the ring.
    """
    q, k, v, tokens, rules = operands
    sizes = TileSizes.of(q, k, v, rules)
    plan = make_plan(sizes, tokens, rules)
    axes, place = mesh_place()
    ranks = jax.lax.axis_size(axis_name)
    shape = Shape(sizes, rules, ranks, plan.is_shared, plan.num_marks, axes, axis_name)
    key_marks = jax.lax.all_gather(plan.key_marks, axis_name)
    scalars = place, make_visits(sizes, plan, rules, axis_name)
    return shape, scalars, (plan.row_marks, key_marks)


def pad_row(width: int) -> int:
    """Return the elements that a row takes in VMEM.

    Args:
        width: Width of the row.
    """
    return -(-width // LANES) * LANES


def vmem_budget() -> int:
    """Return the bytes that a kernel may keep in VMEM of the chips that the program is for.

    Without such chips it is that of the smaller current ones.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != "tpu":
        return 2**26 - 2 * BLOCKS_VMEM
    return pltpu.get_tpu_info().vmem_capacity_bytes - 2 * BLOCKS_VMEM


def make_visits(sizes: TileSizes, plan: BlockPlan, rules: Rules, axis_name: str) -> Array:
    """Return what each block of rows sees of every rank's keys.

    Args:
        sizes: Sizes of a rank's arrays.
        plan: Marks and bounds of a rank.
        rules: Mask rules.
        axis_name: Mesh axis of the ring.

    Returns:
        [b' ranks row_blocks key_blocks], flat: HIDDEN, PARTLY or WHOLLY.
    """
    rows = plan.row_bounds.reshape(-1, sizes.row_blocks, RECORD)
    keys = plan.key_bounds.reshape(-1, sizes.key_blocks, RECORD)
    keys = jax.lax.all_gather(keys, axis_name, axis=1)
    by_row = Bounds(*(rows[:, None, :, None, at] for at in range(4)))
    by_key = Bounds(*(keys[:, :, None, :, at] for at in range(4)))
    is_whole = jnp.arange(1, sizes.key_blocks + 1) * sizes.key_block <= sizes.u
    wholly = all_see(rules, by_row, by_key) & is_whole.reshape(1, 1, 1, -1)
    visits = jnp.where(wholly, WHOLLY, jnp.where(may_see(rules, by_row, by_key), PARTLY, HIDDEN))
    shape = (rows.shape[0], keys.shape[1], sizes.row_blocks, sizes.key_blocks)
    return jnp.broadcast_to(visits, shape).reshape(-1).astype(jnp.int32)


class KeyTravel:
    """Rotation of keys in one step of the grid, inside a kernel."""

    def __init__(self, shape: Shape, place: Any, local_keys: tuple[Any, Any], scratch: Any):
        self.shape = shape
        self.head, self.step, self.block = (pl.program_id(axis) for axis in range(3))
        self.turn = self.head * shape.ranks + self.step
        self.slot = jax.lax.rem(self.turn, 2)
        coordinates: Any = {axis: place[at] for at, axis in enumerate(shape.axes)}
        rank = coordinates[shape.axis_name]
        name = shape.axis_name
        self.here = coordinates
        self.next: Any = coordinates | {name: jax.lax.rem(rank + 1, shape.ranks)}
        self.previous: Any = coordinates | {name: jax.lax.rem(rank + shape.ranks - 1, shape.ranks)}
        k_slots, v_slots, *semaphores = scratch
        self._load, self._send, self._receive, self._capacity, self._passed = semaphores
        self._sides = ((local_keys[0], k_slots), (local_keys[1], v_slots))
        self.keys = k_slots.at[self.slot]
        self.values = v_slots.at[self.slot]

    @property
    def is_last_step(self) -> Any:
        """Whether this is the last step of the head."""
        return self.step == self.shape.ranks - 1

    @property
    def is_first_block(self) -> Any:
        """Whether this is the first block of the turn."""
        return self.block == 0

    @property
    def is_last_block(self) -> Any:
        """Whether this is the last block of the turn."""
        return self.block == self.shape.sizes.row_blocks - 1

    def begin(self) -> None:
        """Wait for the keys of a turn, and start sending them, at the turn's first block."""
        is_sent = self.step < self.shape.ranks - 1

        @pl.when(self.turn == 0)
        def _():
            meet(self.here, self.shape.axis_name, self._passed)
            for copy in self._loading(0, 0):
                copy.start()

        @pl.when(self.step == 0)
        def _():
            for copy in self._loading(self.head, self.slot):
                copy.wait()

        @pl.when(self.step > 0)
        def _():
            for copy in self._sending(1 - self.slot):
                copy.wait_recv()

        @pl.when(is_sent)
        def _():
            pl.when(self.turn > 0)(lambda: pl.semaphore_wait(self._capacity, 1))
            for copy in self._sending(self.slot):
                copy.start()

        @pl.when(jnp.logical_not(is_sent) & (self.head < self.shape.heads - 1))
        def _():
            for copy in self._loading(self.head + 1, 1 - self.slot):
                copy.start()

    def end(self) -> None:
        """Wait until the keys are sent, and free the slot, at the turn's last block."""

        @pl.when(self.step < self.shape.ranks - 1)
        def _():
            for copy in self._sending(self.slot):
                copy.wait_send()

        # The rank before may fill this slot in the next turn, if it sends anything then.
        sends_next = jax.lax.rem(self.turn + 1, self.shape.ranks) != self.shape.ranks - 1

        @pl.when(sends_next & (self.turn + 1 < self.shape.turns))
        def _():
            pl.semaphore_signal(self._capacity, 1, device_id=self.previous)

    def leave(self) -> None:
        """Wait for all ranks, at the end of the last turn."""
        part(self.shape.axis_name, self._passed)

    def for_visible(self, visits: Any, place: Any, compute: Any) -> None:
        """Run `compute(block of keys, is_masked)` for the keys that the block of queries sees.

        Args:
            visits: Result of `make_visits`.
            place: Index of this device along every mesh axis.
            compute: Computes one tile.
        """
        sizes = self.shape.sizes
        start = self.shape.sequence(self.head) * self.shape.ranks
        start = (start + self.shape.owner(place, self.step)) * sizes.row_blocks + self.block

        @pl.loop(0, sizes.key_blocks)
        def _(index):
            visit = visits[start * sizes.key_blocks + index]
            pl.when(visit == PARTLY)(lambda: compute(index, True))
            pl.when(visit == WHOLLY)(lambda: compute(index, False))

    def _loading(self, head: Any, slot: Any) -> list[Any]:
        return [
            pltpu.make_async_copy(local.at[head], slots.at[slot], self._load.at[side])
            for side, (local, slots) in enumerate(self._sides)
        ]

    def _sending(self, slot: Any) -> list[Any]:
        """Return the copies from a slot to the other one of the next rank, also for waiting."""
        return [
            pltpu.make_async_remote_copy(
                slots.at[slot],
                slots.at[1 - slot],
                self._send.at[side],
                self._receive.at[1 - slot, side],
                self.next,
            )
            for side, (_, slots) in enumerate(self._sides)
        ]


def tile_mask(shape: Shape, row_marks: Any, key_marks: Any, index: Any) -> Array:
    """Return the mask of a tile [rows keys].

    Args:
        shape: Static part of the kernel.
        row_marks: Marks of the current block of queries.
        key_marks: Marks of all current keys.
        index: Index of the block of keys.
    """
    queries = [column(row_marks[at : at + 1])[:, :1] for at in range(shape.num_marks)]
    keys = [key_marks[index, at : at + 1] for at in range(shape.num_marks)]
    segments = (queries[1], keys[1]) if shape.num_marks == 2 else (None, None)
    is_visible = sees(shape.rules, queries[0], keys[0], *segments)
    sizes = shape.sizes
    if sizes.keys > sizes.u:
        numbers = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.key_block), 1)
        is_visible &= numbers + index * sizes.key_block < sizes.u
    return is_visible
