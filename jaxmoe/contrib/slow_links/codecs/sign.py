# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends one bit a number: signs, and one scale for each matrix of a parameter.

sent = scale * sign(x),  scale = |x| / sqrt(numbers that are sent),  sign(0) = 1

Each layer and expert has a scale of its own, the same on every mesh.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key, UInt8

from jaxmoe.contrib.slow_links.codec import Codec, Payload
from jaxmoe.contrib.slow_links.exchange import About, Decode, Exchange, no_state


class Signs(NamedTuple):
    """Numbers that travel."""

    bits: UInt8[Array, " bytes"]
    """Signs of eight numbers in a byte, 1 for 0 and above."""
    scale: Float[Array, "*matrices"]
    """Size of the numbers of each matrix."""


def sign(stacked: int, setting: About | None) -> Codec:
    """Return the codec of signs.

    Args:
        stacked: Leading dimensions that count matrices.
        setting: Numbers that are sent, and how devices split the parameter; None for all of a whole
            parameter. Numbers that are not sent must be 0.
    """

    def encode(x: Array, state: Any, key: Key[Array, ""]) -> tuple[Signs, Any]:
        del key
        return Signs(jnp.packbits((x >= 0).ravel()), _scale(x, stacked, setting)), state

    def decode(payload: Signs, like: Array) -> Array:
        signs = _signs(payload.bits, like.size, like.dtype).reshape(like.shape)
        return signs * _widen(payload.scale, like, setting)

    def bits(shape: tuple[int, ...]) -> int:
        return 8 * -(-math.prod(shape) // 8) + 32 * math.prod(shape[:stacked])

    return Codec(init=no_state, encode=encode, decode=decode, bits=bits)


def two_sided_mean(stacked: int) -> Exchange:
    """Return the exchange in which signs travel to the mean, and back.

    Each worker receives its part of all messages, adds the error of the parts before to their mean,
    and sends the signs of the result. The second scale is one for each matrix as well, whatever the
    parts, so that every mesh gives the same numbers. The error lies in an array of the size of the
    parameter, 0 outside the worker's part.

    Args:
        stacked: Leading dimensions that count matrices.
    """

    def mix(payload: Payload, decode: Decode, slow: Array, setting: About, state: Any) -> Any:
        assert setting.alive is not None  # set in every exchange of gradients
        number = setting.workers
        dtype = slow.dtype
        size = -(-slow.size // (8 * number))
        me = jax.lax.axis_index(setting.axis)

        def part(x: Array) -> Array:
            flat = jnp.pad(x.ravel(), (0, 8 * size * number - x.size))
            return flat.reshape(number, 8 * size)[me]

        def whole(x: Array) -> Array:
            empty = jnp.zeros((number, 8 * size), dtype)
            return empty.at[me].set(x).ravel()[: slow.size].reshape(slow.shape)

        def add(
            total: Array, worker_part: tuple[Array, Array, Bool[Array, ""]]
        ) -> tuple[Array, None]:
            bits, scale, is_alive = worker_part
            sent = _signs(bits, 8 * size, dtype) * part(_widen(scale, slow, setting))
            return total + jnp.where(is_alive, sent, jnp.zeros_like(sent)), None

        bits = jnp.pad(payload.bits, (0, size * number - payload.bits.size)).reshape(number, size)
        received = jax.lax.all_to_all(bits, setting.axis, 0, 0, tiled=True)
        scales = jax.lax.all_gather(payload.scale, setting.axis)
        total, _ = jax.lax.scan(
            add, jnp.zeros((8 * size,), dtype), (received, scales, setting.alive)
        )
        mean = total / jnp.sum(setting.alive).astype(dtype) + part(state)
        target = whole(mean)
        sent = jax.lax.all_gather(jnp.packbits(mean >= 0), setting.axis, tiled=True)
        scale = _scale(target, stacked, setting, setting.axis)
        result = decode(Signs(sent[: payload.bits.size], scale), slow)
        is_mine = whole(jnp.ones((8 * size,), dtype)) > 0
        return result, jnp.where(is_mine, target - result, jnp.zeros_like(target))

    return Exchange(init=jnp.zeros_like, mix=mix)


def _scale(x: Array, stacked: int, setting: About | None, axis: str | None = None) -> Array:
    """Return the root of the mean square of each matrix.

    Args:
        x: What this device holds.
        stacked: Leading dimensions that count matrices.
        setting: Numbers that are sent, and how devices split the parameter.
        axis: Axis of workers that hold parts; None where each has all.
    """
    free = tuple(range(stacked, x.ndim))
    mask = None if setting is None else setting.mask
    sent = jnp.ones_like(x) if mask is None else mask.astype(x.dtype)
    squares = jnp.sum(x**2, axis=free)
    count = jnp.sum(sent, axis=free)
    if setting is not None:
        squares = setting.total(squares, free)
        count = setting.total(count, free)
    if axis is not None:
        squares = jax.lax.psum(squares, axis)
    return jnp.sqrt(squares / jnp.maximum(count, 1.0))


def _widen(scale: Array, like: Array, setting: About | None) -> Array:
    """Return the size of each number, 0 for those that are not sent."""
    wide = jnp.broadcast_to(scale[(...,) + (None,) * (like.ndim - scale.ndim)], like.shape)
    mask = None if setting is None else setting.mask
    return wide if mask is None else jnp.where(mask, wide, jnp.zeros_like(wide))


def _signs(bits: UInt8[Array, " bytes"], number: int, dtype: Any) -> Float[Array, " number"]:
    """Return the signs of some numbers."""
    return 2 * jnp.unpackbits(bits, count=number).astype(dtype) - 1
