# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses entries of a table of n^2 by two sets of n keys and a small core (product keys).

Entry i n + j has the score s_ij = sum_ab row[i, a] C[a, b] col[j, b]. Two passes find the K best:

    1. C ~ sigma u v^T:     the K rows of the largest row[i] . u, the K columns of the largest
                            col[j] . v
    2. s_ij on the K x K:   the K largest

With C of rank 1 and no first score of either side below 0, or with K = n, the result is that of all
n^2 scores. Else it need not be: two first scores below 0 have a product above 0, which pass 1 drops
(a pair at -5 and -5 scores 25 and is never seen), and a second direction of C is not looked at.
Sources: product keys, arXiv 1907.05242; Tucker core, arXiv 2411.12364.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmoe.layers.norms import rms_norm

Chosen = tuple[Int[Array, "*T K"], Float[Array, "*T K"]]
"""Entries, and their scores in descending order."""


def score_keys(
    query: Float[Array, "*T h 2 d"], keys: Float[Array, "s r n d"], epsilon: float
) -> tuple[Float[Array, "*T h n r"], Float[Array, "*T h n r"]]:
    """Return the scores of row keys and of column keys: of variance 1 for fresh keys.

    Args:
        query: Query of each head and side.
        keys: Keys of each head and side (s = 2 h), by rank.
        epsilon: Term added to the mean squares of queries and keys, which are normed.
    """
    ones = jnp.ones(query.shape[-1:], jnp.float32)
    query, keys = (rms_norm(x.astype(jnp.float32), ones, epsilon) for x in (query, keys))
    keys = keys.reshape(-1, 2, *keys.shape[1:]) / jnp.float32(math.sqrt(query.shape[-1]))
    sides = (
        jnp.einsum(
            "...hd,hrnd->...hnr",
            query[..., side, :],
            keys[:, side],
            preferred_element_type=jnp.float32,
        )
        for side in (0, 1)
    )
    rows, columns = sides
    return rows, columns


def leading_directions(core: Float[Array, "2 2"]) -> tuple[Float[Array, " 2"], Float[Array, " 2"]]:
    """Return the first left and right singular vectors of the core, in closed form.

    Of the two signs that the pair may have it is the one with the larger sum.

    Args:
        core: C.
    """
    core = core.astype(jnp.float32)
    squared = core.T @ core
    angle = 0.5 * jnp.arctan2(2.0 * squared[0, 1], squared[0, 0] - squared[1, 1])
    right = jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    row_factor = core @ right
    row_factor = row_factor / jnp.maximum(jnp.linalg.norm(row_factor), jnp.finfo(jnp.float32).tiny)
    sign = jnp.where(row_factor.sum() + right.sum() < 0.0, -1.0, 1.0)
    return sign * row_factor, sign * right


def choose_entries(
    rows: Float[Array, "*T n 2"],
    columns: Float[Array, "*T n 2"],
    core: Float[Array, "2 2"],
    top_k: int,
) -> Chosen:
    """Return the best entries by two passes.

    Args:
        rows: Scores of the row keys, by rank.
        columns: Scores of the column keys, by rank.
        core: C.
        top_k: K.
    """
    num_keys, (row_factor, right) = rows.shape[-2], leading_directions(jax.lax.stop_gradient(core))

    def best(scores: Array, direction: Array) -> tuple[Array, Array]:
        first = jnp.einsum("...na,a->...n", jax.lax.stop_gradient(scores), direction)
        index = jax.lax.top_k(first, top_k)[1]
        return index, jnp.take_along_axis(scores, index[..., None], axis=-2)

    (row_ids, rows), (column_ids, columns) = best(rows, row_factor), best(columns, right)
    scores, place = _largest(rows, columns, core, top_k)
    first = jnp.take_along_axis(row_ids, place // top_k, axis=-1)
    second = jnp.take_along_axis(column_ids, place % top_k, axis=-1)
    return first * jnp.int32(num_keys) + second, scores


def choose_among_all(
    rows: Float[Array, "*T n 2"],
    columns: Float[Array, "*T n 2"],
    core: Float[Array, "2 2"],
    top_k: int,
) -> Chosen:
    """Return the best entries of all n^2: the reference of `choose_entries`."""
    scores, place = _largest(rows, columns, core, top_k)
    return place, scores


def _largest(rows: Array, columns: Array, core: Array, top_k: int) -> tuple[Array, Array]:
    """Return the largest scores of a grid, and their places in it."""
    grid = jnp.einsum("...ia,ab,...jb->...ij", rows, core, columns)
    values, places = jax.lax.top_k(grid.reshape(*grid.shape[:-2], -1), top_k)
    return values, places


@functools.cache
def expected_norm(num_keys: int, top_k: int) -> float:
    """Return the expected root of the sum of squares of the K scores of a fresh layer.

    There a score is the product of two independent standard normal numbers; the quantiles of n
    stand for the numbers.

    Args:
        num_keys: n.
        top_k: K.
    """
    normal = statistics.NormalDist()
    best = [normal.inv_cdf(1.0 - (place + 0.5) / num_keys) for place in range(top_k)]
    products = sorted((a * b for a, b in itertools.product(best, best)), reverse=True)
    return math.sqrt(sum(score * score for score in products[:top_k]))
