# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The recurrences in chunks: products or an associative scan within one, the state between them.

With l_i the sum of the log decays of a chunk up to i, and h the state before it:

    y_i = sum over j <= i of exp(l_i - l_j) dt_j (c_i b_j) x_j  +  exp(l_i) h c_i
    h'  = exp(l_last) h  +  sum over j of exp(l_last - l_j) dt_j x_j b_j^T

A border between documents is a mask of equal documents. A log decay of -inf at a border would be
lost with all sums behind it. A chunk is computed again in the backward pass, which keeps one state
per chunk. Source: arXiv 2405.21060 (section 6).
"""

from collections.abc import Callable

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
    groups = b.shape[2]
    heads = x.shape[2] // groups

    def by_group(array: Array, axis: int) -> Array:
        return array.reshape(*array.shape[:axis], groups, heads, *array.shape[axis + 1 :])

    x, dt, decay = by_group(x, 2), by_group(dt, 2), by_group(decay, 0)

    def body(carry, now):
        h, before = carry
        x, dt, b, c, documents = now
        logs = jnp.cumsum(dt * decay[None, None], axis=1)
        length, last = x.shape[1], documents[:, -1]
        is_seen = documents[:, :, None] == documents[:, None]
        is_seen &= jnp.tril(jnp.ones((length, length), bool))[None]
        is_seen = is_seen[..., None, None]
        between = jnp.where(is_seen, logs[:, :, None] - logs[:, None], 0.0)
        weights = jnp.where(is_seen, jnp.exp(between), 0.0) * dt[:, None]
        weights *= _products("bigh,bjgh->bijg", c, b)[..., None]
        y = _products("bijgr,bjgrp->bigrp", weights.astype(x.dtype), x)
        is_before = (documents == before[:, None])[..., None, None]
        reach = jnp.where(is_before, jnp.exp(logs), 0.0)
        y += _products("bigh,bgrph->bigrp", c.astype(jnp.float32), h) * reach[..., None]
        is_last = (documents == last[:, None])[..., None, None]
        kept = jnp.where(is_last, jnp.exp(logs[:, -1:] - logs) * dt, 0.0)
        written = (kept[..., None] * x.astype(jnp.float32)).astype(x.dtype)
        stays = jnp.where((before == last)[:, None, None], jnp.exp(logs[:, -1]), 0.0)
        h = stays[..., None, None] * h + _products("bjgrp,bjgh->bgrph", written, b)
        return (h, last), y.astype(x.dtype)

    y, h = _over_chunks(body, (x, dt, b, c), documents, by_group(initial, 1), chunk)
    return y.reshape(*y.shape[:2], -1, y.shape[-1]), h.reshape(initial.shape)


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

    def after(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        return one[0] * two[0], two[0] * one[1] + two[1]

    def body(carry, now):
        h, before = carry
        x, dt, b, c, documents = now
        earlier = jnp.concatenate([before[:, None], documents[:, :-1]], axis=1)
        factors = jnp.exp(dt[..., None] * decay[None, None])
        factors = jnp.where((documents == earlier)[..., None, None], factors, 0.0)
        written = (dt * x.astype(jnp.float32))[..., None] * b.astype(jnp.float32)[:, :, None]
        kept, added = jax.lax.associative_scan(after, (factors, written), axis=1)
        states = kept * h[:, None] + added
        y = _products("bidh,bih->bid", states, c.astype(jnp.float32))
        return (states[:, -1], documents[:, -1]), y.astype(x.dtype)

    return _over_chunks(body, (x, dt, b, c), documents, initial, chunk)


def _over_chunks(
    body: Callable[..., tuple[tuple[Array, Array], Array]],
    arrays: tuple[Array, ...],
    documents: Array,
    initial: Array,
    chunk: int,
) -> tuple[Array, Array]:
    """Return outputs and last state of a body that is called with one chunk after the other.

    The last chunk is filled with steps of 0 of its last document.
    """
    rows, length = documents.shape
    chunk = min(chunk, length)
    extra = -length % chunk

    def cut(array: Array, mode: str = "constant") -> Array:
        padding = ((0, 0), (0, extra)) + ((0, 0),) * (array.ndim - 2)
        array = jnp.pad(array, padding, mode=mode)
        return jnp.moveaxis(array.reshape(rows, -1, chunk, *array.shape[2:]), 1, 0)

    given = (*map(cut, arrays), cut(documents, "edge"))
    (h, _), y = jax.lax.scan(jax.checkpoint(body), (initial, documents[:, 0]), given)
    y = jnp.moveaxis(y, 0, 1)
    return y.reshape(rows, -1, *y.shape[3:])[:, :length], h


def _products(subscripts: str, one: Array, other: Array) -> Array:
    return jnp.einsum(subscripts, one, other, preferred_element_type=jnp.float32)
