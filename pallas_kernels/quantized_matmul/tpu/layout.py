# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lays out operands of the TPU kernels of quantized_matmul: values in tiles, scales beside them.

The contracted dimension k is a row of scale blocks of one size, the same on both sides: where sides
differ, the common divisor; where neither has blocks, all of k is one. A block is cut or padded with
zeros until it is 32, 64 or a multiple of 128 up to 1024, so that tiles hold whole blocks:

    values   x [m K], w [K n]                           K = k with padding
    ends     x [1 m], w [1 n]                           scales that hold for all of k
    parts    x [K / tile, blocks m], w [.. blocks n]    scales of the blocks of a tile

Kinds of scales that are missing are None. Lengths m and n need no padding: what a tile computes
beyond the edge is dropped (of m alone, a single tile is padded to whole registers).

The MXU multiplies floats as they come; integers as int8 where it has integers, else as bfloat16,
which holds them exactly and sums 1024 products of int8 exactly in float32; float8 as it is where
the MXU has it, else as bfloat16, which holds it exactly. Blocks of 4 bits on both sides (all of
w4a4, those of a MixedArray after its wide ones) are int4 where it has integers.

To add a TPU generation: its device kind in `INTEGER_UNITS` or `FLOAT8_UNITS` of
`pallas_kernels/quantized_matmul/tpu/layout.py`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.backend import device_kind
from pallas_kernels.quantized_array import QuantizedArray

LANES = 128
EXACT = 1024
"""Products of two int8 that float32 sums exactly: 1024 * 127^2 < 2^24."""
INTEGER_UNITS = ("TPU v5 lite", "TPU v5e", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e", "cpu")
FLOAT8_UNITS = ("TPU7x",)
MEMORY = 12 * 2**20
"""Bytes of VMEM for a kernel, of 16 MiB and more."""
_ROWS = 32
"""Rows of int8 in one register tile; fewer rows are padded to it."""


class FactorLayout(NamedTuple):
    """Static layout of a product."""

    m: int
    k: int
    """Length of the sum, with padding."""
    n: int
    tile_m: int
    tile_k: int
    tile_n: int
    block: int | None
    """Values along k that share a scale; None for all."""
    multiplied: Any
    """Dtype in which the MXU multiplies."""
    is_integer: bool
    """Whether sums are exact integers."""
    narrow_from: int | None
    """First block multiplied in 4 bits, as are those after it; None for none."""
    filled: tuple[int, int]
    """Size of a block as given, and padded; of k where there are no blocks."""
    is_turned: bool
    """Whether the product is [m n] @ [k n]^T, with sums [m k]."""

    def drop_padding(self, out: Array, k: int) -> Array:
        """Return [m K] without the padding of blocks, [m k]."""
        size, filled = self.filled
        if size < filled:
            blocks = out[:, : out.shape[1] // filled * filled]
            out = blocks.reshape(out.shape[0], -1, filled)[:, :, :size].reshape(out.shape[0], -1)
        return out[:, :k]


class Factor(NamedTuple):
    """One side of the product; None everywhere if only a shape was given."""

    values: Array | None
    ends: Array | None
    parts: Array | None


def lay_out(
    x: Array | QuantizedArray | jax.ShapeDtypeStruct,
    w: QuantizedArray,
    out_dtype: Any,
    *,
    num_wide: int | None = None,
    is_turned: bool = False,
) -> tuple[FactorLayout, Factor, Factor]:
    """Cut a product into tiles.

    Args:
        x: [m k], with scales along -1 or one scale.
        w: [k n], with scales along -2 or one scale.
        out_dtype: Dtype of the result.
        num_wide: Number of blocks of w that meet x in 8 bits, the others in 4; None: as x has them.
        is_turned: Whether the result has the shape of x, from a factor [m n].
    """
    (m, k), n = x.shape, w.shape[1]
    is_integer = isinstance(x, QuantizedArray) and jnp.issubdtype(x.values.dtype, jnp.integer)
    block_size = _common_block(x, w)
    filled = k if block_size is None else _whole(block_size)
    block = None
    if block_size is not None:
        block = max(b for b in (32, 64, *range(LANES, EXACT + 1, LANES)) if filled % b == 0)
    if is_integer and _values(x).dtype == jnp.int4 == w.values.dtype:
        num_wide = 0
    is_narrow = num_wide is not None and device_kind() in INTEGER_UNITS
    is_narrow &= block is None or block >= LANES
    narrow_from = (num_wide or 0) * (filled // (block or filled)) if is_narrow else None
    layout = FactorLayout(
        m=_up(m, _ROWS), k=_up(k // (block_size or k) * filled, LANES), n=n, tile_m=0, tile_k=0,
        tile_n=0, block=block, multiplied=_multiply(x), is_integer=is_integer,
        narrow_from=narrow_from, filled=(block_size or k, filled), is_turned=is_turned,
    )  # fmt: skip
    layout = _with_tiles(layout, x, w, out_dtype)
    if layout.tile_m < layout.m:
        layout = layout._replace(m=m)
    x_factor = Factor(None, None, None)
    if not isinstance(x, jax.ShapeDtypeStruct):
        values = fill(_fill(_values(x), 1, layout), 0, layout.m)
        x_factor = Factor(values, _ends(x, m, layout.m), _parts(x, layout, layout.m))
    rhs = Factor(_fill(w.values, 0, layout), _ends(w, n, n), _parts(w, layout, n))
    return layout, x_factor, rhs


# Blocks of scales.


def _common_block(x: Any, w: Any) -> int | None:
    sizes = [a.block_size for a in (x, w) if isinstance(a, QuantizedArray)]
    sizes = [size for size in sizes if size is not None]
    return math.gcd(*sizes) if sizes else None


def _parts(a: Any, layout: FactorLayout, length: int) -> Array | None:
    """Return the scales of a side with blocks, [tiles, blocks of a tile, m or n]."""
    if layout.block is None or not isinstance(a, QuantizedArray) or a.block_size is None:
        return None
    size, filled = layout.filled
    scales = a.scales.astype(jnp.float32)
    scales = scales.T if a.axis == -1 else scales
    # Repeat for the common blocks, then for the pieces into which they are cut.
    scales = jnp.repeat(scales, a.block_size // size * (filled // layout.block), axis=0)
    scales = fill(fill(scales, 0, layout.k // layout.block), 1, length)
    return scales.reshape(layout.k // layout.tile_k, layout.tile_k // layout.block, length)


def _ends(a: Any, length: int, filled: int) -> Array | None:
    """Return the scales of a side without blocks, [1 m] or [1 n]."""
    if not isinstance(a, QuantizedArray) or a.block_size is not None:
        return None
    row = jnp.broadcast_to(a.scales.astype(jnp.float32).reshape(1, -1), (1, length))
    return fill(row, 1, filled)


def _fill(values: Array, axis: int, layout: FactorLayout) -> Array:
    """Pad every block, and then k."""
    size, filled = layout.filled
    if size < filled:
        before = values.shape[:axis]
        after = values.shape[axis + 1 :]
        parts = fill(values.reshape(*before, -1, size, *after), axis + 1, filled)
        values = parts.reshape(*before, -1, *after)
    return fill(values, axis, layout.k)


def _whole(block: int) -> int:
    """Return the size to which a block is padded."""
    return next((size for size in (32, 64) if block <= size), _up(block, LANES))


def fill(array: Array, axis: int, length: int) -> Array:
    """Pad an array with zeros to a length.

    Args:
        array: Any array.
        axis: Axis to pad.
        length: Length afterwards.
    """
    if array.shape[axis] == length:
        return array
    shape = (*array.shape[:axis], length - array.shape[axis], *array.shape[axis + 1 :])
    return jnp.concatenate([array, jnp.zeros(shape, array.dtype)], axis)


def _up(length: int, unit: int) -> int:
    return -(-length // unit) * unit


# Dtypes.


def _values(a: Any) -> Any:
    return a.values if isinstance(a, QuantizedArray) else a


def _multiply(x: Any) -> Any:
    if not isinstance(x, QuantizedArray):
        return x.dtype
    if jnp.issubdtype(x.values.dtype, jnp.integer):
        return jnp.dtype(jnp.int8 if device_kind() in INTEGER_UNITS else jnp.bfloat16)
    # Two kinds of float8 may meet: each is kept.
    return None if device_kind() in FLOAT8_UNITS else jnp.dtype(jnp.bfloat16)


# Tiles.


def _with_tiles(layout: FactorLayout, x: Any, w: Any, out_dtype: Any) -> FactorLayout:
    widths = tuple(_width(dtype) for dtype in (_values(x).dtype, _values(w).dtype, out_dtype))

    def fits(sizes: Mapping[str, int]) -> bool:
        return _fits(layout, sizes, widths)

    sizes = _rule(layout, fits)
    m = min(sizes["m"], layout.m)
    n = min(sizes["n"], layout.n)
    return layout._replace(tile_m=m, tile_k=sizes["k"], tile_n=n)


def _width(dtype: Any) -> float:
    """Return the bytes of one value."""
    return 0.5 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize


def _rule(layout: FactorLayout, fits: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
    """Return tile sizes: long in k for few rows, limited by reading w; squarer for many."""
    unit = max(LANES, layout.block or LANES)
    longest = 2048 if layout.m <= 64 else 1024
    if layout.is_turned or layout.block in (32, 64):
        longest = 512
    lengths = [unit * d for d in range(layout.k // unit, 0, -1) if layout.k % (unit * d) == 0]
    lengths = [k for k in lengths if k <= max(longest, unit)]
    sizes = {"m": min(layout.m, 512), "k": lengths[0], "n": min(_up(layout.n, LANES), 512)}
    while not fits(sizes):
        name = max(sizes, key=lambda name: sizes[name])
        shorter = [k for k in lengths if k < sizes["k"]]
        if name == "k" and shorter:
            sizes["k"] = shorter[0]
        else:
            name = max(("m", "n"), key=lambda name: sizes[name])
            sizes[name] = _up(sizes[name] // 2, LANES)
    return sizes


def _fits(layout: FactorLayout, sizes: Mapping[str, int], widths: tuple[float, ...]) -> bool:
    """Return whether blocks and registers are whole, and two tiles of all copies fit memory."""
    m, k, n = (sizes[name] for name in "mkn")
    if layout.k % k or k % max(LANES, layout.block or 1):
        return False
    if (m % LANES and m < layout.m) or (n % LANES and n < layout.n):
        return False
    if m > max(layout.m, LANES) or n > _up(layout.n, LANES):
        return False  # as the whole
    m = min(m, layout.m)
    n = min(n, _up(layout.n, LANES))
    x, w, out = (m * k, k * n, m * n) if not layout.is_turned else (m * n, k * n, m * k)
    scales = 8 * -(-k // (8 * (layout.block or k))) * (_up(m, LANES) + n) * 4
    copied = 2 * (x * widths[0] + w * widths[1] + out * widths[2] + scales)
    wide = 4 if layout.is_turned or layout.multiplied == jnp.float32 else 2
    return copied + wide * (x + w) + 3 * 4 * out <= MEMORY
