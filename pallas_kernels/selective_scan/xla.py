# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements the scans in chunks: many tokens at once within a chunk, one chunk after the other.

With the sums l of dt A from the beginning of a chunk (arXiv 2405.21060, section 6) and only over
pairs i >= j of one segment, state_space_dual is, in products of matrices,

    y[i]  = sum over j of exp(l[i] - l[j]) (c[i] . b[j]) dt[j] x[j]  +  exp(l[i]) c[i] h
    h'    = sum over j of exp(l[Q] - l[j]) dt[j] x[j] b[j]^T         +  exp(l[Q]) h

where h is the state before the chunk and Q its last token. Pairs of different segments are masked:
a decay of -inf would make all later sums -inf. selective_scan has a decay for every number of the
state, and combines the tokens of a chunk pairwise, log2(chunk) times; a border is a factor 0.

JAX derives the gradients. A chunk is computed again in the backward pass, so that of S / chunk
chunks only the states are kept, and never [S N P] numbers.
"""

from collections.abc import Callable
from typing import Any

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
    """Return what `pallas_kernels.selective_scan` returns; arguments as in reference.py."""

    def one(state, before, arrays, segments):
        x, dt, b, c = (each.astype(jnp.float32) for each in arrays)
        previous = jnp.concatenate([before[:, None], segments[:, :-1]], axis=1)
        continues = (segments == previous)[:, :, None, None]
        factor = jnp.where(continues, jnp.exp(dt[..., None] * decay[None, None]), 0.0)
        written = (dt * x)[..., None] * b[:, :, None, :]
        factor, written = jax.lax.associative_scan(_combine, (factor, written), axis=1)
        states = factor * state[:, None] + written
        return states[:, -1], jnp.einsum("bqdp,bqp->bqd", states, c)

    return _over_chunks(one, (x, dt, b, c), segments, initial, chunk)


def _combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
    return later[0] * earlier[0], later[0] * earlier[1] + later[1]


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
    """Return what `pallas_kernels.state_space_dual` returns; arguments as in reference.py."""
    groups = b.shape[2]

    def one(state, before, arrays, segments):
        x, dt, b, c = arrays
        # [B q M g] and more: g heads of a group.
        x = _in_groups(x, groups)
        dt = _in_groups(dt, groups)
        state = state.reshape(state.shape[0], groups, -1, *state.shape[2:])
        sums = jnp.cumsum(dt * decay.reshape(1, 1, groups, -1), axis=1)
        last = segments[:, -1:]
        carried = jnp.exp(sums) * _as_factor(segments == before[:, None])
        read = jnp.einsum("bimp,bmghp->bimgh", c.astype(jnp.float32), state)
        y = carried[..., None] * read + _within(x, dt, b, c, sums, segments)
        to_end = jnp.exp(sums[:, -1:] - sums) * _as_factor(segments == last) * dt
        added = jnp.einsum(
            "bjmgh,bjmp->bmghp",
            to_end[..., None] * x.astype(jnp.float32),
            b.astype(jnp.float32),
        )
        state = carried[:, -1, :, :, None, None] * state + added
        return state.reshape(initial.shape), y.reshape(*y.shape[:2], *initial.shape[1:3])

    return _over_chunks(one, (x, dt, b, c), segments, initial, chunk)


def _within(
    x: Array, dt: Array, b: Array, c: Array, sums: Array, segments: Array
) -> Float32[Array, "B q M g H"]:
    """Return what the tokens of a chunk read of each other."""
    lower = jnp.tri(sums.shape[1], dtype=bool)[None]
    is_read = (segments[:, :, None] == segments[:, None, :]) & lower
    is_read = is_read[:, None, None]
    sums, dt = (jnp.moveaxis(each, 1, 3) for each in (sums, dt))  # [B M g q]
    # The exponent of a masked pair may overflow: it is replaced before and after.
    exponent = jnp.where(is_read, sums[..., :, None] - sums[..., None, :], 0.0)
    factor = jnp.where(is_read, jnp.exp(exponent), 0.0) * dt[..., None, :]
    scores = jnp.einsum("bimp,bjmp->bmij", c, b, preferred_element_type=jnp.float32)
    weights = (scores[:, :, None] * factor).astype(x.dtype)
    return jnp.einsum("bmgij,bjmgh->bimgh", weights, x, preferred_element_type=jnp.float32)


def _in_groups(x: Array, groups: int) -> Array:
    return x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])


def _as_factor(mask: Array) -> Array:
    return mask.astype(jnp.float32)[:, :, None, None]


def _over_chunks(
    chunk_step: Callable[..., Any],
    arrays: tuple[Array, ...],
    segments: Array,
    initial: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """Return y and the last state of `chunk_step`, chunk after chunk.

    Args:
        chunk_step: From the state, the segment of the token before, and a chunk, to
            the next state and y in float32.
        arrays: Arrays [B S ...]; x comes first.
        segments: Segment of each token.
        initial: First state.
        chunk: Tokens of a chunk; the last chunk is padded with steps of length 0.
    """
    batch, length = segments.shape
    number = -(-length // chunk)
    padding = number * chunk - length

    def cut(x: Array, mode: str) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return jnp.moveaxis(x.reshape(batch, number, chunk, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def step(carry, chunk_of):
        (state, before), (arrays, segments) = carry, chunk_of
        state, y = chunk_step(state, before, arrays, segments)
        return (state, segments[:, -1]), y.astype(arrays[0].dtype)

    chunks = (tuple(cut(x, "constant") for x in arrays), cut(segments, "edge"))
    (state, _), y = jax.lax.scan(step, (initial, jnp.zeros_like(segments[:, 0])), chunks)
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(batch, number * chunk, *y.shape[3:])[:, :length], state
