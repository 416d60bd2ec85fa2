# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Order statistics of columns in constant space: integer histograms, which add up exactly.

    bin of v        clip(floor((v - low) / width), 0, bins - 1)
    k-th smallest   in the first bin at which the running count reaches k; inside the bin the values
                    are taken as evenly spread, so the error is below one width

Counts are integers: whatever the mesh, the order of summation or the number of micro-batches, the
sum is the same to the last bit, and so is what is read off it. Values outside the range count in
the outermost bins.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped


def histogram(
    values: Float[Array, "G n E"],
    mask: Bool[Array, "G n"],
    *,
    low: Float[Array, ""],
    width: Float[Array, ""],
    num_bins: int,
) -> Int[Array, "G E bins"]:
    """Counts of the unmasked rows held here, by group, column and bin.

    Args:
        values: f32, not NaN.
        mask: False leaves a row out.
        low: lower edge of the first bin.
        width: of each bin.
        num_bins: bins per column.
    """
    groups, _, columns = values.shape
    place = jnp.clip(jnp.floor((values - low) / width), 0.0, num_bins - 1.0).astype(jnp.int32)
    group = jnp.arange(groups, dtype=jnp.int32)[:, None, None]
    column = jnp.arange(columns, dtype=jnp.int32)[None, None, :]
    counts = jnp.zeros((groups, columns, num_bins), jnp.int32)
    return counts.at[group, column, place].add(mask[:, :, None].astype(jnp.int32))


def kth_smallest(
    counts: Shaped[Array, "*c bins"],
    k: Shaped[Array, "*c"],
    *,
    low: Float[Array, ""],
    width: Float[Array, ""],
) -> Float[Array, "*c"]:
    """The k-th smallest value of each column, read off its histogram.

    Args:
        counts: summed over all devices.
        k: from 1, with the dimensions of `counts` before the bins.
        low: lower edge of the first bin.
        width: of each bin.

    Returns:
        The upper edge of the last bin where a column holds fewer than k.
    """
    counts, k = counts.astype(jnp.float32), k.astype(jnp.float32)[..., None]
    running = jnp.cumsum(counts, axis=-1)
    first = jnp.argmax(running >= k, axis=-1, keepdims=True)
    inside, until = (jnp.take_along_axis(array, first, axis=-1) for array in (counts, running))
    share = (k - (until - inside) - 0.5) / jnp.maximum(inside, 1.0)
    place = jnp.where(running[..., -1:] >= k, first.astype(jnp.float32) + share, counts.shape[-1])
    return (low + width * place)[..., 0]
