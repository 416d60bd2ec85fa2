# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Codec of the largest numbers of each tile of a matrix, in 14 or 44 bits a number kept.

Matrices are cut into tiles of at most 64 x 64, and vectors into pieces of at most 64: the side of a
tile is the largest divisor of the dimension up to 64. Of each tile the same share is kept, at least
one number, with its place in the tile in 12 bits. A tile never spans two layers or two experts, so
that rare experts, whose numbers are small, are not starved by others.

The numbers kept of one matrix are quantised to 2 bits: mean m and deviation s of these numbers cut
the line into four bins of width 1.5 s, and each bin stands for the mean of its members, so that the
sum is preserved. Source: arXiv 2508.15706 and its public code.
"""

from __future__ import annotations

import math
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt8

from jaxmoe.contrib.slow_links.codec import Codec
from jaxmoe.contrib.slow_links.fragments import Leaf
from sharding import axes as ax

SIDE: Final = 64
BINS: Final = 4
_RANGE: Final = 6.0


class TopK(NamedTuple):
    """Encoded parameter."""

    places: UInt8[Array, " bytes"]
    """Place of each number in its tile, 12 bits each."""
    codes: UInt8[Array, " bytes"] | None
    """Bin of each number, 2 bits each."""
    values: Float[Array, "matrices n"]
    """Value of each bin; or the numbers themselves, without codes."""


class Tiling(NamedTuple):
    """Cuts of a parameter into tiles."""

    matrices: int
    """Layers times experts."""
    rows: tuple[int, int]
    """Tiles along the rows, and rows of a tile."""
    columns: tuple[int, int]
    """Tiles along the columns, and columns of a tile."""
    kept: int
    """Numbers kept of a tile."""

    @property
    def tiles(self) -> int:
        """Number of tiles of one matrix."""
        return self.rows[0] * self.columns[0]

    @property
    def numbers(self) -> int:
        """Numbers kept of all matrices."""
        return self.matrices * self.tiles * self.kept

    def cut(self, x: Array) -> Float[Array, "tiles numbers"]:
        """Return the tiles of all matrices as rows."""
        (r, a), (c, b) = self.rows, self.columns
        return x.reshape(self.matrices, r, a, c, b).swapaxes(2, 3).reshape(-1, a * b)

    def join(self, tiles: Float[Array, "tiles numbers"], shape: tuple[int, ...]) -> Array:
        """Return the parameter from its tiles."""
        (r, a), (c, b) = self.rows, self.columns
        return tiles.reshape(self.matrices, r, c, a, b).swapaxes(2, 3).reshape(shape)


def tiling(shape: tuple[int, ...], batch: int, share: float) -> Tiling:
    """Return the tiles of a parameter.

    Args:
        shape: Shape.
        batch: Leading dimensions that count matrices. Of the rest the first is that of rows, and
            the others together that of columns.
        share: Share of the numbers that is kept.
    """

    def divide(size: int) -> tuple[int, int]:
        side = max(side for side in range(1, min(size, SIDE) + 1) if size % side == 0)
        return size // side, side

    dims = shape[batch:]
    rows = divide(dims[0]) if len(dims) > 1 else (1, 1)
    columns = divide(math.prod(dims[1:] if len(dims) > 1 else dims))
    num_kept = max(1, round(rows[1] * columns[1] * share))
    return Tiling(math.prod(shape[:batch]), rows, columns, num_kept)


def top_k(leaf: Leaf, share: float, values: Literal["two_bits", "float32"]) -> Codec:
    """Return the codec of a parameter.

    Args:
        leaf: Parameter; its layers and experts are matrices of their own.
        share: Share of the numbers that is kept.
        values: Encoding of the numbers.
    """
    batch = _batch(leaf)

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[TopK, Any]:
        del key
        cuts = tiling(x.shape, batch, share)
        tiles = cuts.cut(x)
        _, places = jax.lax.top_k(jnp.abs(tiles), cuts.kept)
        numbers = jnp.take_along_axis(tiles, places, axis=1).reshape(cuts.matrices, -1)
        packed = pack_twelve(places.reshape(-1))
        if values == "float32":
            return TopK(packed, None, numbers), state
        codes, table = two_bits(numbers)
        return TopK(packed, pack_two(codes.reshape(-1)), table), state

    def decode(payload: TopK, like: Array) -> Array:
        cuts = tiling(like.shape, batch, share)
        places = unpack_twelve(payload.places, cuts.numbers).reshape(-1, cuts.kept)
        numbers = payload.values
        if payload.codes is not None:
            codes = unpack_two(payload.codes, cuts.numbers).reshape(cuts.matrices, -1)
            numbers = jnp.take_along_axis(payload.values, codes, axis=1)
        tiles = jnp.zeros((len(places), cuts.rows[1] * cuts.columns[1]), numbers.dtype)
        tiles = jnp.put_along_axis(tiles, places, numbers.reshape(places.shape), 1, inplace=False)
        return cuts.join(tiles, like.shape).astype(like.dtype)

    def bits(shape: tuple[int, ...]) -> int:
        cuts = tiling(shape, batch, share)
        places = 24 * math.ceil(cuts.numbers / 2)
        if values == "float32":
            return places + 32 * cuts.numbers
        return places + 8 * math.ceil(cuts.numbers / 4) + 32 * BINS * cuts.matrices

    return Codec(init=lambda x: (), encode=encode, decode=decode, bits=bits)


def two_bits(
    numbers: Float[Array, "matrices n"],
) -> tuple[Int[Array, "matrices n"], Float[Array, "matrices bins"]]:
    """Return the bin of each number, and the mean of the numbers of each bin.

    Args:
        numbers: Numbers of each matrix.
    """
    count = numbers.shape[1]
    middle = jnp.mean(numbers, axis=1, keepdims=True)
    squares = jnp.sum(jnp.square(numbers - middle), axis=1, keepdims=True)
    width = _RANGE / BINS * jnp.sqrt(squares / max(count - 1, 1))
    codes = jnp.round((numbers - middle) / jnp.where(width > 0, width, 1) + BINS / 2)
    codes = jnp.clip(codes, 0, BINS - 1).astype(jnp.int32)
    members = (codes[:, :, None] == jnp.arange(BINS, dtype=jnp.int32)[None, None]).astype(
        numbers.dtype
    )
    sums = jnp.sum(members * numbers[:, :, None], axis=1)
    return codes, sums / jnp.maximum(jnp.sum(members, axis=1), 1)


def pack_twelve(numbers: Int[Array, " n"]) -> UInt8[Array, " bytes"]:
    """Return integers below 4096 as three bytes for two of them."""
    pairs = jnp.pad(numbers, (0, len(numbers) % 2)).reshape(-1, 2)
    first = pairs[:, 0]
    second = pairs[:, 1]
    parts = (first & 255, (first >> 8) | ((second & 15) << 4), second >> 4)
    return jnp.stack(parts, axis=1).astype(jnp.uint8).reshape(-1)


def unpack_twelve(packed: UInt8[Array, " bytes"], count: int) -> Int[Array, " n"]:
    """Return the first integers of the result of `pack_twelve`."""
    low, middle, high = jnp.moveaxis(packed.reshape(-1, 3).astype(jnp.int32), 1, 0)
    pairs = jnp.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], axis=1)
    return pairs.reshape(-1)[:count]


def pack_two(codes: Int[Array, " n"]) -> UInt8[Array, " bytes"]:
    """Return integers below 4 as one byte for four of them."""
    rows = jnp.pad(codes, (0, -len(codes) % 4)).reshape(-1, 4)
    return jnp.sum(rows << _shifts(), axis=1).astype(jnp.uint8)


def unpack_two(packed: UInt8[Array, " bytes"], count: int) -> Int[Array, " n"]:
    """Return the first integers of the result of `pack_two`."""
    rows = packed.astype(jnp.int32)[:, None] >> _shifts()
    return (rows & 3).reshape(-1)[:count]


def _shifts() -> Int[Array, "1 4"]:
    return jnp.asarray([[0, 2, 4, 6]], jnp.int32)


def _batch(leaf: Leaf) -> int:
    """Return the number of leading dimensions that count layers and experts."""
    layers = int(leaf.is_stacked)
    return layers + int(ax.EXPERTS in leaf.axes[layers : layers + 1])
