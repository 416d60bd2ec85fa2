# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends the largest numbers of every tile of a parameter.

A tile has at most `edge` numbers along each of the last two dimensions, and divides what a device
holds. It lies in one layer and one expert, so that the large gradients of busy experts do not
displace those of rare ones. Every mesh selects the same numbers where each device holds whole tiles
of the parameter, as it does where `edge` divides the local sizes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt16

from jaxmoe.contrib.slow_links.codec import Codec
from jaxmoe.contrib.slow_links.exchange import no_state


class Largest(NamedTuple):
    """Numbers that travel."""

    values: Float[Array, "tiles k"]
    places: UInt16[Array, "tiles k"]
    """Place of each in its tile."""


def largest(share: float, stacked: int, edge: int = 64) -> Codec:
    """Return the codec of the largest numbers.

    Args:
        share: Share of the numbers of a tile that are sent, rounded up.
        stacked: Leading dimensions that count matrices.
        edge: Largest size of a tile along a dimension, at most 256.
    """

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[Largest, Any]:
        del key
        tiles = _tiles(x, stacked, edge)
        _, places = jax.lax.top_k(jnp.abs(tiles), _count(share, tiles.shape[1]))
        values = tiles[jnp.arange(len(tiles))[:, None], places]
        return Largest(values, places.astype(jnp.uint16)), state

    def decode(payload: Largest, like: Array) -> Array:
        number, area = _tiles_of(like.shape, stacked, edge)
        rows = jnp.arange(number)[:, None]
        tiles = jnp.zeros((number, area), payload.values.dtype)
        tiles = tiles.at[rows, payload.places.astype(jnp.int32)].set(payload.values)
        return _whole(tiles, like.shape, stacked, edge).astype(like.dtype)

    def bits(shape: tuple[int, ...]) -> int:
        number, area = _tiles_of(shape, stacked, edge)
        return (32 + 16) * number * _count(share, area)

    return Codec(init=no_state, encode=encode, decode=decode, bits=bits)


def _count(share: float, area: int) -> int:
    return min(area, max(1, math.ceil(share * area)))


def _edges(shape: tuple[int, ...], stacked: int, edge: int) -> tuple[int, int]:
    """Return the size of a tile along the last two dimensions."""

    def divisor_of(size: int) -> int:
        return next(divisor for divisor in range(min(size, edge), 0, -1) if size % divisor == 0)

    down, across = (1, 1, *shape[stacked:])[-2:]
    return divisor_of(down), divisor_of(across)


def _tiles_of(shape: tuple[int, ...], stacked: int, edge: int) -> tuple[int, int]:
    """Return the number of tiles, and the numbers in each."""
    area = math.prod(_edges(shape, stacked, edge))
    return math.prod(shape) // area, area


def _matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return a shape as [matrices, rows, columns]."""
    rows, columns = (1, 1, *shape)[-2:]
    return math.prod(shape) // (rows * columns), rows, columns


def _tiles(x: Array, stacked: int, edge: int) -> Float[Array, "tiles area"]:
    """Return an array by tiles."""
    down, across = _edges(x.shape, stacked, edge)
    number, rows, columns = _matrices(x.shape)
    cut = x.reshape(number, rows // down, down, columns // across, across)
    return jnp.moveaxis(cut, 2, 3).reshape(-1, down * across)


def _whole(
    tiles: Float[Array, "tiles area"], shape: tuple[int, ...], stacked: int, edge: int
) -> Array:
    """Return the array of which these are the tiles."""
    down, across = _edges(shape, stacked, edge)
    number, rows, columns = _matrices(shape)
    cut = tiles.reshape(number, rows // down, columns // across, down, across)
    return jnp.moveaxis(cut, 3, 2).reshape(shape)
