# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Summaries of the keys of a page, scores of pages, and the attention that pages receive.

Everything is of one device: its rows B, its heads M of keys (each with G heads of queries), and its
pages p of `size` slots.
"""

from __future__ import annotations

from typing import Final, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from sharding.sequence_parallel.local_attention import AttentionRules

PageScore = Literal["bounds", "mean"]
"""bounds: an upper bound of the logits of a page (Quest); mean: the logit of its mean key."""

NUM_SUMMARIES: Final[dict[PageScore, int]] = {"bounds": 2, "mean": 1}
"""Arrays that summarize the keys of a page."""

_EMPTY: Final = 1e30
"""Bound of a page without keys; finite, so that a feature of 0 gives 0."""

_OBSERVED: Final = 32
"""Last tokens of a prompt whose attention decides on eviction."""

Summaries = dict[str, Float[Array, "*L B p M H"]]
"""low and high: smallest and largest of each feature of a page's keys; total: their sum."""


def empty_summaries(score: PageScore, shape: tuple[int, ...]) -> Summaries:
    """Return the summaries of pages without keys.

    Args:
        score: How pages will be scored.
        shape: Shape of one of the arrays.
    """
    if score == "mean":
        return {"total": jnp.zeros(shape, jnp.float32)}
    return {
        "low": jnp.full(shape, _EMPTY, jnp.float32),
        "high": jnp.full(shape, -_EMPTY, jnp.float32),
    }


def with_new_keys(
    summaries: Summaries,
    keys: Float[Array, "B S M H"],
    layer: Int[Array, ""],
    pages: Int[Array, "B S"],
    token_mask: Bool[Array, "B S"],
) -> Summaries:
    """Return the summaries of all layers with the new keys of one layer.

    Args:
        summaries: Those of the pages of this device, stacked over layers.
        keys: New keys, each written for the first time.
        layer: Layer that they are of.
        pages: Page of each, counted from the first of this device; others are left out.
        token_mask: False for padding.
    """
    end = jnp.int32(next(iter(summaries.values())).shape[2])
    pages = jnp.where((pages < 0) | ~token_mask, end, pages)
    rows = jnp.arange(keys.shape[0], dtype=jnp.int32)[:, None]
    new = keys.astype(jnp.float32)
    updates = {"low": "min", "high": "max", "total": "add"}
    return {
        name: getattr(summary.at[layer, rows, pages], updates[name])(new, mode="drop")
        for name, summary in summaries.items()
    }


def page_scores(
    q: Float[Array, "B M G H"], summaries: Summaries, num_keys: Int[Array, "B p"]
) -> Float[Array, "B p M"]:
    """Return the score of each page for one token: the largest over its query heads.

    Args:
        q: Queries by head of keys.
        summaries: Those of one layer.
        num_keys: Keys of each page.
    """
    q = q.astype(jnp.float32)

    def product(q: Array, features: Array) -> Array:
        return jnp.einsum("bmgh,bpmh->bpmg", q, features, preferred_element_type=jnp.float32)

    if "total" in summaries:
        count = jnp.maximum(num_keys, 1).astype(jnp.float32)[:, :, None]
        return jnp.max(product(q, summaries["total"]), axis=-1) / count
    upper = product(jnp.maximum(q, 0.0), summaries["high"])
    return jnp.max(upper + product(jnp.minimum(q, 0.0), summaries["low"]), axis=-1)


def attention_received(
    q: Float[Array, "B S N H"],
    keys: Float[Array, "B u M H"],
    key_positions: Int[Array, " u"],
    positions: Int[Array, "B S"],
    token_mask: Bool[Array, "B S"],
    rules: AttentionRules,
    axes: tuple[str, ...],
    size: int,
) -> Float[Array, "B p M"]:
    """Return the attention that each page received from the last tokens of the prompts.

    Args:
        q: Queries of the prompts, padded on the right.
        keys: Keys of this device.
        key_positions: Their positions.
        positions: Positions of the queries.
        token_mask: False for padding.
        rules: Mask, scale and soft cap.
        axes: Mesh axes over which slots are cut.
        size: Tokens of a page.
    """
    batch, length, _, width = q.shape
    heads = keys.shape[2]
    number = min(length, _OBSERVED)
    last = jnp.sum(token_mask, axis=1, dtype=jnp.int32)[:, None]
    index = last - jnp.int32(number) + jnp.arange(number, dtype=jnp.int32)[None, :]
    is_token = index >= 0
    index = jnp.maximum(index, 0)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    queries = q[rows, index].reshape(batch, number, heads, -1, width).astype(jnp.float32)
    logits = jnp.einsum(
        "bwmgh,bumh->bmgwu", queries, keys.astype(jnp.float32), preferred_element_type=jnp.float32
    )
    logits *= jnp.float32(width**-0.5 if rules.scale is None else rules.scale)
    if rules.softcap is not None:
        logits = jnp.float32(rules.softcap) * jnp.tanh(logits / jnp.float32(rules.softcap))
    distance = positions[rows, index][:, :, None] - key_positions[None, None, :]
    is_seen = (distance >= 0) & is_token[:, :, None]
    if rules.window is not None:
        is_seen &= distance < rules.window
    if rules.chunk is not None:
        first = positions - positions % jnp.int32(rules.chunk)
        is_seen &= key_positions[None, None, :] >= first[rows, index][:, :, None]
    logits = jnp.where(is_seen[:, None, None], logits, -jnp.inf)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jax.lax.pmax(top, axes) if axes else top
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = jax.lax.psum(total, axes) if axes else total
    share = jnp.sum(weights / jnp.where(total > 0.0, total, 1.0), axis=(2, 3))
    return jnp.sum(share.reshape(batch, heads, -1, size), axis=-1).swapaxes(1, 2)
