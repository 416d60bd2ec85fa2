# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Order statistics of columns in constant space, from integer histograms.

    bin of v        clip(floor((v - low) / width), 0, bins - 1)
    k-th smallest   in the first bin at which the running count reaches k; inside the bin the values
                    are taken as evenly spread, so the error is below one width

Counts are integers, so sums and the statistics computed from them are bitwise the same for every
mesh, order of summation and number of micro-batches. Values outside the range are counted in the
outermost bins.
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
    """Count the unmasked rows on this device by group, column and bin.

    Args:
        values: Values, f32, not NaN.
        mask: False excludes a row.
        low: Lower edge of the first bin.
        width: Width of each bin.
        num_bins: Bins per column.
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
    """Return the k-th smallest value of each column from its histogram.

    Args:
        counts: Histogram summed over all devices.
        k: Rank from 1, with the dimensions of `counts` before the bins.
        low: Lower edge of the first bin.
        width: Width of each bin.

    Returns:
        Values; the upper edge of the last bin where a column has fewer than k rows.
    """
    counts = counts.astype(jnp.float32)
    k = k.astype(jnp.float32)[..., None]
    running = jnp.cumsum(counts, axis=-1)
    first = jnp.argmax(running >= k, axis=-1, keepdims=True)
    inside, until = (jnp.take_along_axis(array, first, axis=-1) for array in (counts, running))
    share = (k - (until - inside) - 0.5) / jnp.maximum(inside, 1.0)
    place = jnp.where(running[..., -1:] >= k, first.astype(jnp.float32) + share, counts.shape[-1])
    return (low + width * place)[..., 0]
