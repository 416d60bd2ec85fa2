# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Causal convolution of each channel over a few positions, within documents.

y_t = bias + sum_i taps_i * x_{t - K + 1 + i}        0 <= i < K; x of another document is 0
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def convolve(
    x: Float[Array, "B S *channels"],
    taps: Float[Array, "K ..."],
    bias: Float[Array, "*channels"] | None,
    *,
    segment_ids: Int[Array, "B S"] | None = None,
    before: Float[Array, "B _ *channels"] | None = None,
) -> Float[Array, "B S *channels"]:
    """Return the convolution in the dtype of x.

    Args:
        x: Inputs.
        taps: Weights, the last of them for the position itself.
        bias: Bias of each channel; none when None.
        segment_ids: Document of each position; one document a row when None.
        before: The K - 1 inputs before the first position, of its document; zeros when None.
    """
    reach = taps.shape[0] - 1
    length = x.shape[1]
    inputs = _after(before, x, reach)
    y = jnp.zeros_like(x)
    if bias is not None:
        y = jnp.broadcast_to(bias.astype(x.dtype)[None, None], x.shape)
    ids = None
    if segment_ids is not None:  # the inputs before the first one are of its document
        ids = jnp.pad(segment_ids, ((0, 0), (reach, 0)), mode="edge")
    for tap in range(reach + 1):
        part = inputs[:, tap : tap + length]
        if ids is not None and tap < reach:
            is_same = ids[:, tap : tap + length] == segment_ids
            is_same = is_same.reshape(*is_same.shape, *(1,) * (x.ndim - 2))
            part = jnp.where(is_same, part, jnp.zeros_like(part))
        y = y + part * taps[tap].astype(x.dtype)[None, None]
    return y


def last_inputs(
    x: Float[Array, "B S *channels"],
    before: Float[Array, "B R *channels"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B R *channels"]:
    """Return the last inputs of each row, those of earlier calls included.

    Args:
        x: Inputs.
        before: The inputs before them.
        lengths: Number of positions of each row that are not padding, which stands behind them.
    """
    reach = before.shape[1]
    inputs = _after(before, x, reach)
    index = lengths[:, None] + jnp.arange(reach, dtype=jnp.int32)[None]
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(inputs, index, axis=1, mode="clip").astype(before.dtype)


def _after(before: Array | None, x: Array, reach: int) -> Array:
    """Return inputs behind those before them."""
    if before is None:
        before = jnp.zeros((x.shape[0], reach, *x.shape[2:]), x.dtype)
    return jnp.concatenate([before.astype(x.dtype), x], axis=1)
