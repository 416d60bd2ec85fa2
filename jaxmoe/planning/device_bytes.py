# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of an array on one device, with the padding of TPU tiles.

A TPU stores two dimensions of an array in tiles of s x 128, s the smallest of 1, 2, 4 and 8 that
holds the first of them (8 from 5 on), for the two dimensions that waste least; a vector is stored
in tiles of 128, 256, 512 or 1024. So [48, 8, 4, 128] has no padding, [4, 4, 32] in float32 takes
four times its values, and a scalar 512 bytes. Read off compiled programs (libtpu 0.0.52). Other
platforms do not pad.

This holds for a program's arguments and results; inside, the compiler chooses layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp

from jaxmoe.planning.hardware import Platform

_LANES = 128


def device_bytes(leaves: Iterable[jax.ShapeDtypeStruct], platform: Platform) -> int:
    """Return the bytes on one device of arrays with shardings.

    Args:
        leaves: Shapes with a `sharding`; None means replicated.
        platform: Platform with the layouts.
    """
    return sum(_one(leaf, platform) for leaf in leaves)


def _one(leaf: jax.ShapeDtypeStruct, platform: Platform) -> int:
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        shape = (*shape, 2)
        itemsize = 4
    else:
        itemsize = leaf.dtype.itemsize
    return padded_bytes(shape, itemsize) if platform == "tpu" else math.prod(shape) * itemsize


def padded_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of an argument on a TPU.

    Args:
        shape: Shape of the shard on one device.
        itemsize: Bytes per value.
    """
    if len(shape) < 2:
        size = math.prod(shape)
        # Words of 32 bits: four narrower values share one.
        tile = min(1024, max(_LANES, 1 << (size - 1).bit_length())) if size > 1 else _LANES
        tile = max(tile, _LANES * 4 // itemsize)
        return -(-size // tile) * tile * itemsize
    tiled = min(_tile(rows, columns) for rows, columns in itertools.permutations(shape, 2))
    return int(math.prod(shape) * tiled) * itemsize


def _tile(rows: int, columns: int) -> Fraction:
    """Return the stored values per value of two tiled dimensions."""
    sublanes = min(8, 1 << (rows - 1).bit_length())
    tile_bytes = -(-rows // sublanes) * sublanes * -(-columns // _LANES) * _LANES
    return Fraction(tile_bytes, rows * columns)
