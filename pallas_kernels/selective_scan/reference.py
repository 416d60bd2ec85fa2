# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of the scans: one token after the other, in float32. JAX derives the gradients."""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Float32, Int


def selective_scan(
    x: Float[Array, "B S D"],
    dt: Float32[Array, "B S D"],
    decay: Float32[Array, "D P"],
    b: Float[Array, "B S P"],
    c: Float[Array, "B S P"],
    segments: Int[Array, "B S"],
    initial: Float32[Array, "B D P"],
    *,
    chunk: int,
) -> tuple[Float[Array, "B S D"], Float32[Array, "B D P"]]:
    """Return what `pallas_kernels.selective_scan` returns.

    Args:
        x: Inputs.
        dt: Lengths of the steps, 0 at padding.
        decay: Logarithm of the decay.
        b: What is written.
        c: What is read.
        segments: `Segments.index`.
        initial: State before the first token, of segment 0.
        chunk: Not used here.
    """
    del chunk

    def step(carry, token):
        state, segment = carry
        x, dt, b, c, token_segment = token
        state = jnp.where((token_segment == segment)[:, None, None], state, 0.0)
        state = jnp.exp(dt[:, :, None] * decay[None]) * state
        state = state + (dt * x)[:, :, None] * b[:, None, :]
        return (state, token_segment), jnp.einsum("bdp,bp->bd", state, c)

    return _over_tokens(step, (x, dt, b, c), segments, initial)


def state_space_dual(
    x: Float[Array, "B S N H"],
    dt: Float32[Array, "B S N"],
    decay: Float32[Array, " N"],
    b: Float[Array, "B S M P"],
    c: Float[Array, "B S M P"],
    segments: Int[Array, "B S"],
    initial: Float32[Array, "B N H P"],
    *,
    chunk: int,
) -> tuple[Float[Array, "B S N H"], Float32[Array, "B N H P"]]:
    """Return what `pallas_kernels.state_space_dual` returns; arguments as in selective_scan."""
    del chunk
    heads_per_group = x.shape[2] // b.shape[2]

    def step(carry, token):
        state, segment = carry
        x, dt, b, c, token_segment = token
        b, c = (jnp.repeat(each, heads_per_group, axis=1) for each in (b, c))
        state = jnp.where((token_segment == segment)[:, None, None, None], state, 0.0)
        state = jnp.exp(dt * decay[None])[:, :, None, None] * state
        state = state + (dt[:, :, None] * x)[:, :, :, None] * b[:, :, None, :]
        return (state, token_segment), jnp.einsum("bnhp,bnp->bnh", state, c)

    return _over_tokens(step, (x, dt, b, c), segments, initial)


def _over_tokens(step, arrays, segments, initial):
    tokens = tuple(jnp.moveaxis(each.astype(jnp.float32), 1, 0) for each in arrays)
    first = jnp.zeros_like(segments[:, 0])
    (state, _), y = jax.lax.scan(step, (initial, first), (*tokens, segments.swapaxes(0, 1)))
    return jnp.moveaxis(y, 0, 1).astype(arrays[0].dtype), state
