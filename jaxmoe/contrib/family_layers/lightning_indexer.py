# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer: which keys a query attends to, and attention to these alone.

    I_tu     = sum_j w_tj relu(q_tj . k_u) / sqrt(n I)        n index heads j of I features
    S_t      = the K keys u <= t of the document with the largest I_tu
    o_t      = softmax over S_t of the logits of attention, times the values

The choice has no gradient. A query alone in its row (decoding) gathers its K keys and values; the
others attend with a mask, some queries at a time, so that no array has all pairs of a long row.

Source: DeepSeek-V3.2 (arXiv 2512.02556, section 2.1). Its Hadamard transform of index queries and
keys, which leaves the products as they are, and their 8 bits are left out, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_QUERIES: Final = 128
"""Queries of a row whose logits exist at one time."""


class IndexQueries(NamedTuple):
    """What the indexer compares with index keys."""

    q: Float[Array, "B S n I"]
    """Queries of the index heads."""
    weights: Float[Array, "B S n"]
    """Weight of each head, f32."""


class IndexedKeys(NamedTuple):
    """Keys and values that may be chosen."""

    index: Float[Array, "B U I"]
    """Index keys."""
    k: Float[Array, "B U M H"]
    """Keys; query heads n share the keys of head n // (N / M)."""
    v: Float[Array, "B U M Hv"]
    """Values."""


def index_scores(queries: IndexQueries, keys: Float[Array, "B U I"]) -> Float[Array, "B S U"]:
    """Return the score of each key for each query, f32.

    Args:
        queries: Index queries and the weights of their heads.
        keys: Index keys.
    """
    heads, width = queries.q.shape[2:]
    products = jnp.einsum("bsni,bui->bsnu", queries.q, keys, preferred_element_type=jnp.float32)
    weights = queries.weights * jnp.float32((heads * width) ** -0.5)
    return jnp.einsum(
        "bsnu,bsn->bsu", jax.nn.relu(products), weights, preferred_element_type=jnp.float32
    )


def attend_chosen(
    q: Float[Array, "B S N H"],
    queries: IndexQueries,
    keys: IndexedKeys,
    see: Callable[[Any], Bool[Array, "B s U"]],
    rows: Any,
    *,
    top_k: int,
    scale: float,
) -> Float[Array, "B S N Hv"]:
    """Return attention of each query to the keys that the indexer chooses for it.

    Args:
        q: Queries of attention.
        queries: Index queries.
        keys: Keys and values.
        see: Function of `rows` of some queries to whether they may see each key.
        rows: Arrays [B S] of the queries.
        top_k: K.
        scale: Factor of the logits.
    """
    length = q.shape[1]

    def part(arguments: tuple[Array, IndexQueries, Any]) -> Array:
        q, queries, rows = arguments
        return _attend(q, queries, keys, see(rows), top_k, scale)

    arguments = (q, queries, rows)
    if length <= _QUERIES:
        return part(arguments)
    size = max(size for size in range(1, _QUERIES + 1) if length % size == 0)
    pieces = jax.tree.map(
        lambda x: x.reshape(x.shape[0], length // size, size, *x.shape[2:]).swapaxes(0, 1),
        arguments,
    )
    out = jax.lax.map(jax.checkpoint(part), pieces)
    return out.swapaxes(0, 1).reshape(*q.shape[:3], -1)


def _attend(
    q: Array, queries: IndexQueries, keys: IndexedKeys, is_seen: Array, top_k: int, scale: float
) -> Float[Array, "B s N Hv"]:
    """Return attention of some queries."""
    _, k, v = keys
    if is_seen.shape[2] > top_k:
        scores = jnp.where(is_seen, index_scores(queries, keys.index), -jnp.inf)
        scores = jax.lax.stop_gradient(scores)
        best, places = jax.lax.top_k(scores, top_k)
        if q.shape[1] == 1:
            k, v = (jnp.take_along_axis(x, places[:, 0, :, None, None], axis=1) for x in (k, v))
            is_seen = best > -jnp.inf
        else:
            number, size = is_seen.shape[:2]
            row = jnp.arange(number)[:, None, None]
            column = jnp.arange(size)[None, :, None]
            is_chosen = jnp.zeros(is_seen.shape, bool).at[row, column, places].set(True)
            is_seen = is_seen & is_chosen
    groups = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])  # B, s, M, N / M, H
    logits = jnp.einsum("bsmgh,bumh->bmgsu", groups, k, preferred_element_type=jnp.float32)
    is_seen = is_seen[:, None, None]
    logits = jnp.where(is_seen, logits * jnp.float32(scale), -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.where(is_seen, jnp.exp(logits - jnp.maximum(top, jnp.float32(-1e30))), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(
        v.dtype
    )  # 0 where nothing is seen
    out = jnp.einsum("bmgsu,bumh->bsmgh", weights, v, preferred_element_type=jnp.float32)
    return out.reshape(*q.shape[:3], -1).astype(q.dtype)
