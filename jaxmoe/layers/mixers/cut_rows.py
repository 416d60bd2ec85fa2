# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hands states and inputs on between the devices that hold the parts of a row, in its order.

    h_k       state before part k: f_{k-1} h_{k-1} + s_{k-1}
    s_k       state that part k leaves from zero
    f_k       decay over part k; 0 if a document begins in it

The pairs (f, s) combine associatively, so that log2(parts) exchanges give every part its h. The
functions here run inside a region, on local parts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def inputs_before(
    x: Float[Array, "B S *channels"],
    segment_ids: Int[Array, "B S"],
    reach: int,
    axes: tuple[str, ...],
) -> Float[Array, "B R *channels"]:
    """Return the last inputs of the part before, 0 where they are of another document.

    Args:
        x: Inputs of this part.
        segment_ids: Document of each token.
        reach: Number of inputs (R).
        axes: Mesh axes over which rows are cut.

    Raises:
        ValueError: A part is shorter than the reach.
    """
    length = x.shape[1]
    if length < reach:
        raise ValueError(
            f"execution.mesh.seq leaves parts of {length} tokens, and the convolution of a"
            f" recurrent mixer reads {reach} before its own: set mesh.seq to less,"
            " or give longer sequences"
        )
    inputs, ids = _passed_on((x[:, length - reach :], segment_ids[:, length - reach :]), 1, axes)
    is_same = ids == segment_ids[:, :1]
    is_same = is_same.reshape(*is_same.shape, *(1,) * (x.ndim - 2))
    return jnp.where(is_same, inputs, jnp.zeros_like(inputs))


def state_before(
    last_state: Float32[Array, "B ..."],
    decay: Float32[Array, "B ..."],
    segment_ids: Int[Array, "B S"],
    axes: tuple[str, ...],
) -> Float32[Array, "B ..."]:
    """Return the state of the document of this part's first token, before that token.

    Args:
        last_state: State that this part leaves if it begins with 0.
        decay: Factor of a state over the whole part, in a shape that broadcasts to the state.
        segment_ids: Document of each token, 0 for padding.
        axes: Mesh axes over which rows are cut.
    """
    earlier = _document_before(segment_ids, axes)[:, None]
    is_same = (segment_ids == 0) | (segment_ids == earlier)
    first = jnp.argmax(segment_ids != 0, axis=1)[:, None]  # 0 in a part of padding
    continues = jnp.take_along_axis(is_same, first, axis=1)[:, 0]

    def mask_rows(mask: Array, values: Array) -> Array:
        mask = mask.reshape(-1, *(1,) * (last_state.ndim - 1))
        return jnp.where(mask, values, jnp.zeros_like(values))

    factor = mask_rows(jnp.all(is_same, axis=1), decay)
    state = last_state
    step = 1
    while step < jax.lax.axis_size(axes):
        other_factor, other_state = _passed_on((factor, state), step, axes)
        factor, state = factor * other_factor, state + factor * other_state
        step *= 2
    return mask_rows(continues, _passed_on(state, 1, axes))


def _document_before(segment_ids: Array, axes: tuple[str, ...]) -> Int[Array, " B"]:
    """Return the document of the last token before this part that is no padding; 0 if none is."""
    length = segment_ids.shape[1]
    places = jnp.where(segment_ids != 0, jnp.arange(length, dtype=jnp.int32)[None], -1)
    last = jnp.take_along_axis(segment_ids, jnp.argmax(places, axis=1)[:, None], axis=1)[:, 0]
    every = jax.lax.all_gather(last, axes)  # [parts B]; 0 for a part of padding
    parts = jnp.arange(every.shape[0], dtype=jnp.int32)[:, None]
    is_known = (every != 0) & (parts < jax.lax.axis_index(axes))
    chosen = jnp.max(jnp.where(is_known, parts, -1), axis=0, keepdims=True)
    documents = jnp.take_along_axis(every, jnp.maximum(chosen, 0), axis=0)
    return jnp.where(chosen >= 0, documents, 0)[0]


def _passed_on(tree: Any, step: int, axes: tuple[str, ...]) -> Any:
    """Return the arrays of the part `step` places before this one, 0 where there is none."""
    count = jax.lax.axis_size(axes)
    pairs = [(source, source + step) for source in range(count - step)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, pairs), tree)
