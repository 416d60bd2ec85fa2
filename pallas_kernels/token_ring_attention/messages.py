# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Packs activations [B S N H] and a float32 number per query and head [B N S] into one message.

The numbers follow the activations as further rows [N H], so that one transfer takes both. Where
activations are narrower than float32, a message is an unsigned integer array of their width: halves
of a float32 could be NaN as floating-point values, and a backend that carries bfloat16 as float32
(the CPU's collectives) would not keep their bits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Shaped
from pallas_kernels.token_ring_attention.schedule import statistic_rows


def pack(x: Float[Array, "B S N H"], numbers: Float32[Array, "B N S"]) -> Shaped[Array, "B _ N H"]:
    """Return S rows of x, followed by the rows that hold the numbers.

    Args:
        x: Activations.
        numbers: One float32 number per query and head.
    """
    b, s, n, h = x.shape
    per_word = max(1, 4 // x.dtype.itemsize)
    bits = _bits(x)
    # [B N S], [B S N], and with words last where there are several.
    numbers = numbers.swapaxes(1, 2)
    tail = numbers.astype(x.dtype) if per_word == 1 else _cast(numbers, bits.dtype)
    tail = jnp.moveaxis(tail.reshape(b, s, n, per_word), 3, 2).reshape(b, s * per_word, n)
    rows = statistic_rows(s, h, x.dtype.itemsize)
    tail = jnp.pad(tail, ((0, 0), (0, rows * h - s * per_word), (0, 0)))
    return jnp.concatenate([bits, tail.reshape(b, rows, h, n).swapaxes(2, 3)], axis=1)


def unpack(
    message: Shaped[Array, "B _ N H"], length: int, dtype: jnp.dtype
) -> tuple[Float[Array, "B S N H"], Float32[Array, "B N S"]]:
    """Return the activations and the numbers of a message.

    Args:
        message: Result of `pack`.
        length: Rows S of the activations.
        dtype: Dtype of the activations.
    """
    b, _, n, h = message.shape
    per_word = max(1, 4 // dtype.itemsize)
    tail = message[:, length:].swapaxes(2, 3).reshape(b, -1, n)[:, : length * per_word]
    tail = jnp.moveaxis(tail.reshape(b, length, per_word, n), 2, 3)
    numbers = tail[..., 0].astype(jnp.float32) if per_word == 1 else _cast(tail, jnp.float32)
    x = message[:, :length]
    return x if per_word == 1 else _cast(x, dtype), numbers.swapaxes(1, 2)


def _bits(x: Array) -> Array:
    return x if x.dtype.itemsize >= 4 else _cast(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _cast(x: Array, dtype) -> Array:
    return jax.lax.bitcast_convert_type(x, dtype)
