# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hands states of the delta rule on between the devices that hold the parts of a row.

    S_k       state before part k: T_{k-1} S_{k-1} + W_{k-1}
    W_k       state that part k leaves from zero
    T_k       transition [K K] of part k: the state that it leaves from the identity if it writes
              no values; used only if one document fills the part

Unlike a decay of `jaxmoe.layers.mixers.cut_rows` a transition is a matrix. All parts gather W and
T, and each applies those of the parts before it. The functions run inside a region.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from jaxmoe.contrib.linear_attention.delta_rule import delta_rule


def state_before_part(
    arrays: tuple[Array, ...],
    segment_ids: Int[Array, "B S"],
    axes: tuple[str, ...],
    *,
    chunk: int,
) -> Float32[Array, "B N K V"]:
    """Return the state of the document of this part's first token, before that token.

    Args:
        arrays: q, k, v, g and beta of this part, see `delta_rule`.
        segment_ids: Document of each token, 0 for padding.
        axes: Mesh axes over which rows are cut.
        chunk: Tokens that are computed at once.
    """
    q, k, v, g, beta = arrays
    is_token = segment_ids != 0
    _, written = delta_rule(*arrays, segment_ids=segment_ids, chunk=chunk)
    identity = jnp.eye(k.shape[-1], dtype=jnp.float32)
    shape = (v.shape[0], v.shape[2], *identity.shape)
    _, transition = delta_rule(
        q,
        k,
        jnp.zeros((*v.shape[:3], k.shape[-1]), v.dtype),
        g,
        beta,
        segment_ids=is_token.astype(jnp.int32),
        initial=jnp.broadcast_to(identity[None, None], shape),
        chunk=chunk,
    )
    first, last = _end_documents(segment_ids)
    is_single = jnp.all(~is_token | (segment_ids == first[:, None]), axis=1)
    parts = jax.lax.all_gather((written, transition, first, last, is_single), axes)
    place = jax.lax.axis_index(axes)
    state = jnp.zeros_like(written)
    document = jnp.zeros_like(first)
    for part in range(jax.lax.axis_size(axes)):
        written, transition, start, end, is_single = (each[part] for each in parts)
        passed = _rows(is_single & (start == document), transition @ state)
        is_before = (start != 0) & (part < place)
        state = _rows(is_before, passed + written) + _rows(~is_before, state)
        document = jnp.where(is_before, end, document)
    return _rows(first == document, state)


def _end_documents(segment_ids: Array) -> tuple[Array, Array]:
    """Return the documents of the first and the last token [B] that are no padding; 0 if none."""
    is_token = segment_ids != 0
    length = segment_ids.shape[1]
    places = (jnp.argmax(is_token, axis=1), length - 1 - jnp.argmax(is_token[:, ::-1], axis=1))
    first, last = (
        jnp.take_along_axis(segment_ids, place.astype(jnp.int32)[:, None], axis=1)[:, 0]
        for place in places
    )
    return first, last


def _rows(mask: Bool[Array, " B"], values: Float32[Array, "B N K V"]) -> Array:
    """Return the values of rows for which the mask is set, 0 of others."""
    return jnp.where(mask[:, None, None, None], values, jnp.zeros_like(values))
