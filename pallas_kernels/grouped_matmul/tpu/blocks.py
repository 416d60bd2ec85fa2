# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the TPU kernels for grouped products.

    multiply    rows x summed of the factor, summed x out of the matrix, rows x out of the result
    contract    rows x left, rows x right, and left x right of the result

`rows` may be anything: tiles that hold more than one group compute each group's part in pieces of
PIECE rows. The summed dimension of `multiply` is always cut evenly, so that no tile reaches past
it; results may be cut unevenly, and columns beyond the edge are dropped.

The sizes in TABLE follow from arithmetic; none has been measured. With the whole sum in one tile a
group's matrix is read once per tile of columns, and rows once too: a visit of r rows and o columns
does 2 r o k operations for r k b bytes, o / b operations per byte where the matrix stays, against
240 (v5e) and 166 (v5p) that their memories allow with b = 2.

To add a device: its JAX device kind in TABLE of `pallas_kernels/grouped_matmul/tpu/blocks.py`.
"""

import math
from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import device_kind

PIECE = 128
"""Rows in which a group's part of a tile is computed: the height of the MXU."""
WHOLE = 256
"""Rows in which a tile of one group is computed: a loop, for programs half as long."""
LANES = 128


class Tile(NamedTuple):
    """Sizes of one tile."""

    rows: int
    out: int
    """Columns of the result of `multiply`, of the right factor of `contract`."""
    summed: int
    """Length of the sum of `multiply`; columns of the left factor of `contract`."""


class Bytes(NamedTuple):
    """Bytes of one element in all buffers together."""

    lhs: int
    """Bytes per element of the rows."""
    rhs: int
    """Bytes per element of the matrix, or of the other rows in `contract`."""
    result: int
    """Bytes per element of the result, sums included."""


TABLE: dict[str, dict[str, Tile]] = {
    "": {
        "multiply": Tile(512, 1024, 2048),
        "contract": Tile(512, 1024, 1024),
        "multiply float32": Tile(256, 512, 1024),
        "contract float32": Tile(256, 512, 512),
    },
    "TPU v4": {
        "multiply": Tile(256, 512, 1024),
        "contract": Tile(256, 512, 512),
        "multiply float32": Tile(256, 256, 512),
        "contract float32": Tile(256, 256, 512),
    },
}
"""Tiles by device kind and kernel; "" for all other kinds.

Products of float32 take six passes, and six times as long to compile.
"""


def blocks_for(
    kernel: str,
    rows: int,
    out: int,
    summed: int,
    *,
    each: Bytes,
    is_wide: bool = False,
    sums: int = 1,
    unit: Tile | None = None,
) -> Tile:
    """Return the tile of a kernel that fits into the memory of a core.

    Args:
        kernel: "multiply" or "contract".
        rows: Number of rows R.
        out: Columns of the result (of the right factor of `contract`).
        summed: Length of the sum (columns of the left factor of `contract`).
        each: Bytes per element.
        is_wide: Whether float32 is multiplied.
        sums: Number of results side by side, which share the columns of a tile.
        unit: Units of the sides; a side stays whole where its unit does not divide it.
    """
    unit = unit or Tile(1, 1, 1)
    tile = TABLE.get(device_kind(), TABLE[""])[f"{kernel} float32" if is_wide else kernel]
    tile = tile._replace(out=max(LANES, tile.out // sums))
    is_even = kernel == "multiply"

    def fit(limit: Tile) -> Tile:
        return Tile(
            rows=rows if rows <= PIECE else min(limit.rows, rows // PIECE * PIECE),
            out=_cut(out, limit.out, unit.out, is_even=unit.out > 1),
            summed=_cut(summed, limit.summed, unit.summed, is_even=is_even),
        )

    fitting = fit(tile)
    while tile_bytes(kernel, fitting, each) > budget() and max(tile) > LANES:
        # Halve the longest side first.
        longest = max(range(3), key=lambda i: tile[i])
        tile = Tile(*(max(LANES, n // 2) if i == longest else n for i, n in enumerate(tile)))
        fitting = fit(tile)
    return fitting


def tile_bytes(kernel: str, tile: Tile, each: Bytes) -> int:
    """Return the bytes of a core's memory that a tile takes.

    Args:
        kernel: "multiply" or "contract".
        tile: Sizes of the tile.
        each: Bytes per element.
    """
    rows, out, summed = tile
    pairs = (rows * summed, summed * out, rows * out)
    if kernel == "contract":
        pairs = (rows * summed, rows * out, summed * out)
    return sum(a * b for a, b in zip(pairs, each, strict=True))


def budget() -> int:
    """Return the bytes of a core's memory for tiles: half of it, the rest is the compiler's."""
    return _capacity() // 2


def vmem_limit() -> int:
    """Return the limit for `pallas_call`; XLA keeps a little of the memory."""
    return _capacity() // 8 * 7


def multiplies(first: str, second: str) -> bool:
    """Return whether the matrix unit multiplies these dtypes; without a TPU all but 4-bit ones.

    Args:
        first: Name of a dtype.
        second: Name of a dtype.
    """
    info = _info()
    if info is None:
        return "int4" not in (first, second)
    return info.is_matmul_supported(first, second)


def _info() -> pltpu.TpuInfo | None:
    return pltpu.get_tpu_info() if pltpu.is_tpu_device() else None


def _capacity() -> int:
    info = _info()
    return 64 << 20 if info is None else info.vmem_capacity_bytes


def _cut(length: int, limit: int, unit: int, *, is_even: bool) -> int:
    """Return the largest multiple of lanes and unit up to limit that divides, else the whole."""
    if length <= limit:
        return length
    step = math.lcm(LANES, unit)
    sizes = range(limit // step * step, 0, -step)
    even = (size for size in sizes if length % size == 0)
    if is_even:
        return next(even, length)
    # Cut evenly where that loses less than a quarter of the size.
    best = next(even, 0)
    return best if 4 * best >= 3 * limit or not sizes else sizes[0]
