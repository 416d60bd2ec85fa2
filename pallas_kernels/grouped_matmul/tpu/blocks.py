# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sizes of the tiles of the TPU kernels for grouped products.

    multiply    rows x summed of the factor, summed x out of the matrix, rows x out of the result
    contract    rows x left, rows x right, and left x right of the result

`rows` may be anything: tiles that hold more than one group compute each group's part in pieces of
PIECE rows. The summed dimension of `multiply` is always cut evenly, so that no tile holds what is
not there; results may be cut unevenly, what lies beyond the edge is dropped.

The sizes in TABLE follow from arithmetic; none has been measured. With the whole sum in one tile a
group's matrix is read once per tile of columns, and rows once too: a visit of r rows and o columns
does 2 r o k operations for r k b bytes, o / b operations per byte where the matrix stays, against
240 (v5e) and 166 (v5p) that their memories allow with b = 2.

To add a device: a line in TABLE, by the name that JAX has for it.
"""

import math
from typing import NamedTuple

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import device_kind

PIECE = 128
"""Rows that a group's part of a tile is computed in: of the MXU's height."""
WHOLE = 256
"""Rows that a tile of one group is computed in: a loop, for programs half as long."""
LANES = 128


class Tile(NamedTuple):
    """Sizes of one tile."""

    rows: int
    out: int
    """Columns of the result of `multiply`, of the right factor of `contract`."""
    summed: int
    """Of `multiply`; of `contract` columns of the left factor."""


class Bytes(NamedTuple):
    """What one element takes, all buffers together."""

    left: int
    """Of the rows."""
    right: int
    """Of the matrix; of the other rows in `contract`."""
    result: int
    """Of the result, sums included."""


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
"""By kind of device and kernel; "" for all that are not named. Products of float32 take six passes,
and six times as long to compile."""


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
        rows: R.
        out: Columns of the result (of the right factor of `contract`).
        summed: Length of the sum (columns of the left factor of `contract`).
        each: Bytes of elements.
        is_wide: Whether float32 is multiplied.
        sums: Results side by side, which share the columns of a tile.
        unit: Multiples to keep to; where one does not divide its length the length stays whole.
    """
    unit = unit or Tile(1, 1, 1)
    tile = TABLE.get(device_kind(), TABLE[""])[f"{kernel} float32" if is_wide else kernel]
    tile = tile._replace(out=max(LANES, tile.out // sums))
    is_even = kernel == "multiply"

    def fitted(limit: Tile) -> Tile:
        return Tile(
            rows=rows if rows <= PIECE else min(limit.rows, rows // PIECE * PIECE),
            out=_cut(out, limit.out, unit.out, is_even=unit.out > 1),
            summed=_cut(summed, limit.summed, unit.summed, is_even=is_even),
        )

    fit = fitted(tile)
    while tile_bytes(kernel, fit, each) > budget() and max(tile) > LANES:
        # The longest side first: the product of the two others pays for it.
        longest = max(range(3), key=lambda i: tile[i])
        tile = Tile(*(max(LANES, n // 2) if i == longest else n for i, n in enumerate(tile)))
        fit = fitted(tile)
    return fit


def tile_bytes(kernel: str, tile: Tile, each: Bytes) -> int:
    """Memory of a core that a tile takes.

    Args:
        kernel: "multiply" or "contract".
        tile: Its sizes.
        each: Bytes of elements.
    """
    rows, out, summed = tile
    pairs = (rows * summed, summed * out, rows * out)
    if kernel == "contract":
        pairs = (rows * summed, rows * out, summed * out)
    return sum(a * b for a, b in zip(pairs, each, strict=True))


def budget() -> int:
    """Bytes of a core's memory that tiles may take: half of it, the rest is the compiler's."""
    return _capacity() // 2


def vmem_limit() -> int:
    """For `pallas_call`: XLA keeps a little of the memory for itself."""
    return _capacity() // 8 * 7


def multiplies(first: str, second: str) -> bool:
    """Whether the TPU's matrix unit takes these dtypes; without a TPU all but those of 4 bits.

    Args:
        first: A dtype.
        second: A dtype.
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
    """The largest multiple of lanes and unit up to limit (that divides); the whole where none."""
    if length <= limit:
        return length
    step = math.lcm(LANES, unit)
    sizes = range(limit // step * step, 0, -step)
    even = (size for size in sizes if length % size == 0)
    if is_even:
        return next(even, length)
    # Cut evenly where that costs less than a quarter of the size.
    best = next(even, 0)
    return best if 4 * best >= 3 * limit or not sizes else sizes[0]
