# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""References of the recurrences: one position after the other, in float32.

JAX derives the gradients.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int


def state_space_dual(
    x: Float[Array, "B S N P"],
    dt: Float32[Array, "B S N"],
    decay: Float32[Array, " N"],
    b: Float[Array, "B S G H"],
    c: Float[Array, "B S G H"],
    documents: Int[Array, "B S"],
    initial: Float32[Array, "B N P H"],
    chunk: int,
) -> tuple[Float[Array, "B S N P"], Float32[Array, "B N P H"]]:
    """Return what `pallas_kernels.state_space_dual` returns, from numbered documents."""
    del chunk
    heads = x.shape[2] // b.shape[2]

    def body(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, b, c, is_new = now
        h = jnp.where(is_new[:, None, None, None], 0.0, h)
        written = (dt[..., None] * x)[..., None] * jnp.repeat(b, heads, axis=1)[:, :, None]
        h = jnp.exp(dt * decay[None])[..., None, None] * h + written
        return h, jnp.sum(h * jnp.repeat(c, heads, axis=1)[:, :, None], axis=-1)

    return _over_positions(body, (x, dt, b, c), documents, initial)


def selective_scan(
    x: Float[Array, "B S D"],
    dt: Float32[Array, "B S D"],
    decay: Float32[Array, "D H"],
    b: Float[Array, "B S H"],
    c: Float[Array, "B S H"],
    documents: Int[Array, "B S"],
    initial: Float32[Array, "B D H"],
    chunk: int,
) -> tuple[Float[Array, "B S D"], Float32[Array, "B D H"]]:
    """Return what `pallas_kernels.selective_scan` returns, from numbered documents."""
    del chunk

    def body(h: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, b, c, is_new = now
        h = jnp.where(is_new[:, None, None], 0.0, h)
        h = jnp.exp(dt[..., None] * decay[None]) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.sum(h * c[:, None], axis=-1)

    return _over_positions(body, (x, dt, b, c), documents, initial)


def _over_positions(body, arrays, documents, initial) -> tuple[Array, Array]:
    is_new = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    given = [*(array.astype(jnp.float32) for array in arrays), is_new]
    given = [jnp.moveaxis(array, 1, 0) for array in given]
    h, y = jax.lax.scan(body, initial, tuple(given))
    return jnp.moveaxis(y, 0, 1).astype(arrays[0].dtype), h
