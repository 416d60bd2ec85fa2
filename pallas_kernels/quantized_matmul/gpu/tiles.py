# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tile sizes of the Hopper kernels of quantized_matmul, and the factors that they take.

    widened    w becomes bfloat16 on its way to the tensor cores: a floating x, and few rows of any
    few_bits   both factors meet in 8 bits: float8 and int8, with enough rows that the tensor cores
               and not the memory limit the speed

Pure arithmetic, without a device. To tune the kernels: the constants, `tiles_widened` and
`tiles_few_bits`.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.gpu.hopper_parts import COMPUTING, SHARED
from pallas_kernels.quantized_array import QuantizedArray

FEW_ROWS = 128
"""Number of rows up to which quantised factors are widened as well.

w is then read once, in few bits and without a transpose, where few_bits first transposes it in
memory. Transposing a weight takes an H200 as long as 180 products in bfloat16, by its limits:
about there the two are even. Not measured.
"""

STEP = 64
"""Length of a step of k where w is widened: 128 bytes of bfloat16."""
STEP_FEW_BITS = 128
"""Length of a step of k where both factors have 8 bits."""

EXACT = 256
"""Products of two int8 whose sum is at most 2^22, exact in float32 however it is aligned."""

# Multiprocessors of an H100 or H200: only the number of splits of k depends on it.
_CORES = 132
# Cost of starting a program, in steps: a split has to be longer.
_STARTING = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTiles:
    """The part of the product that a program computes."""

    rows: int
    """Rows of x."""
    columns: int
    """Columns of w, per computing warpgroup or for all of them, depending on the kernel."""
    stages: int
    """Slots of the ring."""
    section: int
    """Steps of k that share their scales, or whose sum the tensor cores hold before it is moved."""
    splits: int = 1
    """Programs that share the sum over k."""


def blocks_of(x: Any, w: QuantizedArray) -> int | None:
    """Return the products along k that share all their scales; None where all do."""
    sizes = [a.block_size for a in (x, w) if isinstance(a, QuantizedArray)]
    block_sizes = [size for size in sizes if size is not None]
    return math.gcd(*block_sizes) if block_sizes else None


def reason_against(x: Any, w: QuantizedArray) -> str | None:
    """Return why neither Hopper kernel takes these factors; None where one does."""
    if not isinstance(x, QuantizedArray) and x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"WGMMA multiplies bfloat16 and float16, not {x.dtype}"
    block = blocks_of(x, w)
    if block is not None and block % STEP:
        return f"blocks of {block} are no multiple of {STEP}"
    return None


def is_widened(x: Any, w: QuantizedArray) -> bool:
    """Return whether w becomes bfloat16; else both factors meet in 8 bits."""
    if not isinstance(x, QuantizedArray):
        return True
    block = blocks_of(x, w)
    if block is not None and block % STEP_FEW_BITS:
        return True
    if x.values.dtype != w.values.dtype and jnp.issubdtype(w.values.dtype, jnp.floating):
        return True
    is_exact = exact_products(x, w) is None or (block or 0) <= (exact_products(x, w) or 0)
    return x.shape[0] <= FEW_ROWS and is_exact


def exact_products(x: Any, w: QuantizedArray) -> int | None:
    """Return how many products of integers float32 may sum, as a multiple of STEP.

    None where the factors are not integers.
    """
    if not isinstance(x, QuantizedArray) or not jnp.issubdtype(x.values.dtype, jnp.integer):
        return None
    narrow = (x.values.dtype, w.values.dtype).count(jnp.int4)
    return EXACT * 16**narrow


def tiles_widened(
    m: int, n: int, k: int, w_bits: int, block: int | None, exact: int | None
) -> QuantizedTiles:
    """Return the tiles of a product with n and k in whole tiles.

    Args:
        m: Rows of x.
        n: Columns of w, a multiple of 128.
        k: Length of the sum, a multiple of STEP.
        w_bits: Bits of a value of w.
        block: Products that share their scales.
        exact: Products that may be summed in float32.
    """
    columns = 128 if n % (128 * COMPUTING) == 0 else 64
    most = k if block is None else block
    section = most if exact is None or block is not None else min(exact, most)
    is_whole = block is None and exact is None
    # Registers of a thread: `rows` for 128 columns, twice where sums are moved.
    rows = _even(m, 128 if is_whole else 64)
    accumulators = COMPUTING * columns
    slot = STEP * (accumulators * w_bits // 8 + rows * 2) + 4 * (accumulators + rows)
    stages = min(8, (SHARED - 2 * STEP * accumulators * 2) // slot)
    section = 1 if is_whole else section // STEP
    # Sections of other lengths would make the sum ragged.
    while (k // STEP) % section:
        section -= 1
    programs = (n // accumulators) * -(-m // rows)
    splits = _splits(programs, k // STEP // section, section)
    return QuantizedTiles(rows=rows, columns=columns, stages=stages, section=section, splits=splits)


def tiles_few_bits(m: int, n: int, block: int | None, out_bytes: int) -> QuantizedTiles:
    """Return the tiles of a product with k in whole steps.

    Args:
        m: Rows of x.
        n: Columns of w.
        block: Products that share their scales.
        out_bytes: Bytes of an element of the result.
    """
    rows = COMPUTING * 64
    programs = -(-m // rows) * (n // 256)
    # Wide tiles read less; narrow ones are for few programs, and for columns that fill half a tile.
    columns = 256 if n % 256 == 0 and programs >= _CORES * 3 // 4 else 128
    slot = STEP_FEW_BITS * (rows + columns) + 4 * (rows + columns)
    # Two buffers of 64 rows and columns per warpgroup, from which the result is written.
    free_bytes = SHARED - COMPUTING * 2 * 64 * 64 * out_bytes
    section = 1 if block is None else block // STEP_FEW_BITS
    return QuantizedTiles(
        rows=rows, columns=columns, stages=min(6, free_bytes // slot), section=section
    )


def _even(m: int, most: int) -> int:
    """Return the rows of a tile, in whole eights, so that equal tiles cover m."""
    tiles = -(-m // most)
    return -(-m // (8 * tiles)) * 8


def _splits(programs: int, sections: int, section: int) -> int:
    """Return the number of splits of k with the fewest steps of the last multiprocessor."""

    def steps(splits: int) -> int:
        waves = -(-programs * splits // _CORES)
        return waves * (-(-sections // splits) * section + _STARTING)

    fit = [s for s in range(1, min(sections, 16) + 1) if -(-sections // s) * (s - 1) < sections]
    return min(fit, key=lambda s: (steps(s), s))
