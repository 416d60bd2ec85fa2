# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cuts attention into tiles for a TPU, and finds the tiles that the mask hides.

    rows    a block holds p positions of each of the g = N / M query heads that share a key head,
            one head after the other: [B M R H], with g * p rows a block
    keys    [B M U H]
    marks   [b' blocks c rows] and [b' blocks c keys] i32, b' = 1 or B: positions, and segment ids
            where there are any
    bounds  least and largest mark of each block, and the first and last block of the other side
            that some of its members may see: for the scalar memory

S and U are padded to whole blocks. Padding of rows is cut off, with gradients 0; padding of keys is
hidden by its index. Ranges come from bounds, so that given positions and segments are treated like
positions from 0: a tile outside a block's range is neither copied nor computed, and a hidden tile
inside it is not computed. Where positions count from 0 the longest range is known at trace time,
and no step is made beyond it.

To add a rule of the mask: `pallas_kernels/flash_attention/mask.py`.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.mask import Rules, Tokens

RECORD = 6
"""Numbers per block in `Plan.row_bounds`: those of `Bounds`, then first and last."""


class BlockSizes(NamedTuple):
    """Sizes of one tile."""

    positions: int
    """Positions p of each query head; a tile has g times as many rows."""
    keys: int


LANES = 128

# Rows and keys of a tile in bfloat16, up to a width of head, H or Hv. The reasons:
#   rows   every block of them reads its keys again; r rows do r operations per byte, and the MXU of
#          a v5e or v6e needs 240 or 570
#   keys   a step costs some 0.35 microseconds of bookkeeping, the products of 512 x 1024 at width
#          128 take 1.4 on a v5e
#   limit  a tile holds three or four arrays of scores in float32, of 2 MiB each at 512 x 1024, its
#          blocks twice, and a kernel has 16 MiB of VMEM
# In float32 everything is twice as large, and products take six passes: half as long both ways.
TABLE = ((256, (512, 1024)), (640, (512, 512)), (1024, (256, 256)))
SMALLEST = (128, 128)
SUBLANES = 16
"""Rows of a bfloat16 register."""


def block_sizes(
    s: int, u: int, g: int, width: int, itemsize: int, window: int | None = None
) -> BlockSizes:
    """Return the tile of a kernel.

    Args:
        s: Queries of a head.
        u: Keys.
        g: Query heads per key head.
        width: Larger one of the head widths H and Hv.
        itemsize: Bytes of an element of q.
        window: Window of the mask; blocks of keys much longer than it would be mostly hidden.
    """
    rows, keys = next((sizes for limit, sizes in TABLE if width <= limit), SMALLEST)
    if itemsize > 2:
        rows = max(rows // 2, LANES)
        keys = max(keys // 2, LANES)
    longest = max(rows // g, SUBLANES)
    # With very many heads, or a number of them that is not a power of 2: a tile of the same area.
    keys = max(rows * keys // max(rows, g * longest) // LANES * LANES, LANES)
    if window is not None:
        keys = min(keys, max(2 * LANES, window))
    return BlockSizes(_even(s, longest, LANES if longest >= LANES else SUBLANES), _even(u, keys))


def _even(length: int, longest: int, unit: int = LANES) -> int:
    """Return the size of about equal blocks in whole units, each padded by less than a unit."""
    unit = min(unit, -(-length // SUBLANES) * SUBLANES)
    blocks = -(-length // (longest // unit * unit or unit))
    return -(-length // (blocks * unit)) * unit


class TileSizes(NamedTuple):
    """Static lengths."""

    b: int
    s: int
    u: int
    m: int
    g: int
    h: int
    hv: int
    row_positions: int
    """Positions p in a block of rows."""
    key_block: int

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, rules: Rules) -> "TileSizes":
        """Return the sizes of the arguments of `flash_attention`."""
        (b, s, n, h), (u, m), hv = q.shape, k.shape[1:3], v.shape[3]
        blocks = block_sizes(s, u, n // m, max(h, hv), q.dtype.itemsize, rules.window)
        return cls(b, s, u, m, n // m, h, hv, *blocks)

    @property
    def row_block(self) -> int:
        """Rows of a block."""
        return self.g * self.row_positions

    @property
    def row_blocks(self) -> int:
        """Number of blocks of rows."""
        return -(-self.s // self.row_positions)

    @property
    def key_blocks(self) -> int:
        """Number of blocks of keys."""
        return -(-self.u // self.key_block)

    @property
    def rows(self) -> int:
        """Number of rows, with padding."""
        return self.row_blocks * self.row_block

    @property
    def keys(self) -> int:
        """Number of keys, with padding."""
        return self.key_blocks * self.key_block

    def to_rows(self, x: Array) -> Array:
        """Reshape [B S N ...] to [B M R ...]."""
        x = _pad(x, 1, self.row_blocks * self.row_positions)
        x = x.reshape(self.b, self.row_blocks, self.row_positions, self.m, self.g, *x.shape[3:])
        x = jnp.moveaxis(x, (3, 1, 4, 2), (1, 2, 3, 4))
        return x.reshape(self.b, self.m, self.rows, *x.shape[5:])

    def from_rows(self, x: Array) -> Array:
        """Reshape [B M R ...] to [B S N ...]."""
        x = x.reshape(self.b, self.m, self.row_blocks, self.g, self.row_positions, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 2, 3, 4), (3, 1, 4, 2))
        x = x.reshape(self.b, self.row_blocks * self.row_positions, self.m * self.g, *x.shape[5:])
        return x[:, : self.s]

    def to_statistics(self, x: Array) -> Array:
        """Reshape [B N S] to [B M blocks 1 rows]: a number per row, along the lanes of a block."""
        return self.to_rows(x.swapaxes(1, 2)).reshape(self.statistics)

    def from_statistics(self, x: Array) -> Array:
        """Reshape [B M blocks 1 rows] to [B N S]."""
        return self.from_rows(x.reshape(self.b, self.m, self.rows)).swapaxes(1, 2)

    @property
    def statistics(self) -> tuple[int, ...]:
        """Shape of one number per row."""
        return self.b, self.m, self.row_blocks, 1, self.row_block

    def to_keys(self, x: Array) -> Array:
        """Reshape [B U M ...] to [B M U ...]."""
        return _pad(x.swapaxes(1, 2), 2, self.keys)

    def from_keys(self, x: Array) -> Array:
        """Reshape [B M U ...] to [B U M ...]."""
        return x[:, :, : self.u].swapaxes(1, 2)


def _pad(x: Array, axis: int, length: int) -> Array:
    if x.shape[axis] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


class Bounds(NamedTuple):
    """Least and largest position and segment of a block: numbers, or arrays of them."""

    low: Any
    high: Any
    first_segment: Any
    last_segment: Any


def may_see(rules: Rules, rows: Bounds, keys: Bounds) -> Any:
    """Return False only where no row of a block sees a key of the other block."""
    possible = (rows.first_segment <= keys.last_segment) & (keys.first_segment <= rows.last_segment)
    if rules.causal:
        possible = possible & (keys.low <= rows.high)
    if rules.window is not None:
        possible = possible & (rows.low - keys.high < rules.window)
        possible = possible & (keys.low - rows.high < rules.window)
    return possible


def all_see(rules: Rules, rows: Bounds, keys: Bounds) -> Any:
    """Return True only where every row of a block sees every key of the other block."""
    certain = (rows.first_segment == keys.last_segment) & (keys.first_segment == rows.last_segment)
    if rules.causal:
        certain = certain & (keys.high <= rows.low)
    if rules.window is not None:
        certain = certain & (rows.high - keys.low < rules.window)
        certain = certain & (keys.high - rows.low < rules.window)
    return certain


class BlockPlan(NamedTuple):
    """Marks of all tokens, and the tiles that are visited."""

    row_marks: Array
    key_marks: Array
    row_bounds: Array
    """Records of the blocks of rows, [b' * row_blocks * RECORD]."""
    key_bounds: Array
    key_steps: int
    """Largest number of blocks of keys that a block of rows visits; static."""
    row_steps: int
    """Largest number of blocks of rows that a block of keys visits; static."""

    @property
    def is_shared(self) -> bool:
        """Whether marks are the same in all sequences."""
        return self.row_marks.shape[0] == 1

    @property
    def num_marks(self) -> int:
        """Number of marks per token: 1, or 2 with segments."""
        return self.row_marks.shape[2]


def make_plan(sizes: TileSizes, tokens: Tokens, rules: Rules) -> BlockPlan:
    """Return marks, bounds and ranges.

    Args:
        sizes: Sizes of the arrays.
        tokens: Positions and segments.
        rules: Mask rules.
    """
    counted = _marks(np, sizes, Tokens(None, None, None, None))
    static = _visits(np, sizes, counted, rules)
    counts_from_0 = tokens.q_positions is None and tokens.kv_positions is None
    if all(x is None for x in tokens):
        marks = counted
        visits = static
    else:
        xp = jnp if any(isinstance(x, jax.Array) for x in tokens) else np
        marks = _marks(xp, sizes, tokens)
        visits = _visits(xp, sizes, marks, rules)
    longest = [int((x[..., 5] - x[..., 4]).max()) + 1 for x in static]
    return BlockPlan(
        row_marks=jnp.asarray(marks[0], jnp.int32),
        key_marks=jnp.asarray(marks[1], jnp.int32),
        row_bounds=jnp.asarray(visits[0].reshape(-1), jnp.int32),
        key_bounds=jnp.asarray(visits[1].reshape(-1), jnp.int32),
        key_steps=max(longest[0], 1) if counts_from_0 else sizes.key_blocks,
        row_steps=max(longest[1], 1) if counts_from_0 else sizes.row_blocks,
    )


def _marks(xp: ModuleType, sizes: TileSizes, tokens: Tokens) -> tuple[Any, Any]:
    q_positions, kv_positions, q_segment_ids, kv_segment_ids = tokens
    if q_positions is None:
        q_positions = np.arange(sizes.s, dtype=np.int32)
    if kv_positions is None:
        kv_positions = np.arange(sizes.u, dtype=np.int32)
    sides = [q_positions, q_segment_ids], [kv_positions, kv_segment_ids]
    arrays = [x for side in sides for x in side if x is not None]
    b = sizes.b if any(x.ndim == 2 for x in arrays) else 1

    def stack(side: list[Any], blocks: int, block: int, times: int) -> Any:
        """Return [b' blocks c times*block]."""
        pad = ((0, 0), (0, blocks * block - side[0].shape[-1]))
        marks = [xp.broadcast_to(x, (b, x.shape[-1])) for x in side if x is not None]
        # Padding repeats the last value, which moves no bound.
        marks = [xp.pad(x.astype(np.int32), pad, mode="edge") for x in marks]
        marks = xp.stack([x.reshape(b, blocks, block) for x in marks], axis=2)
        return xp.tile(marks, (1, 1, 1, times))

    return (
        stack(sides[0], sizes.row_blocks, sizes.row_positions, sizes.g),
        stack(sides[1], sizes.key_blocks, sizes.key_block, 1),
    )


def _visits(
    xp: ModuleType, sizes: TileSizes, marks: tuple[Any, Any], rules: Rules
) -> tuple[Any, Any]:
    """Return the records [b' blocks RECORD] of rows and of keys."""
    rows = _bounds(xp, marks[0])
    keys = _bounds(xp, marks[1])
    by_row = Bounds(*(x[:, :, None] for x in rows))
    by_key = Bounds(*(x[:, None, :] for x in keys))
    seen = may_see(rules, by_row, by_key)  # b', blocks of rows, blocks of keys
    record = functools.partial(xp.stack, axis=-1)
    return record([*rows, *_range(xp, seen)]), record([*keys, *_range(xp, seen.swapaxes(1, 2))])


def _bounds(xp: ModuleType, marks: Any) -> Bounds:
    """Return bounds, [b' blocks] each."""
    low = marks.min(-1)
    high = marks.max(-1)
    if marks.shape[2] == 1:
        same = xp.zeros_like(low[:, :, 0])
        return Bounds(low[:, :, 0], high[:, :, 0], same, same)
    return Bounds(low[:, :, 0], high[:, :, 0], low[:, :, 1], high[:, :, 1])


def _range(xp: ModuleType, seen: Any) -> tuple[Any, Any]:
    """Return the first and last block that may be seen; 0 and -1 where there is none."""
    sees_any = seen.any(-1)
    number = seen.shape[-1]
    first = xp.where(sees_any, seen.argmax(-1), 0)
    last = xp.where(sees_any, number - 1 - seen[..., ::-1].argmax(-1), -1)
    return first.astype(np.int32), last.astype(np.int32)
