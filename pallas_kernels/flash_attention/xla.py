# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements flash_attention without a kernel: blocks of queries against all keys they may see.

FlashAttention-2 (arXiv 2307.08691, section 3.1) with one loop instead of two: a block of queries
meets its keys in one product, so that the softmax is the plain one, and memory is linear in S. The
backward pass is that of kernels.py.

It runs per sequence and key head; the g = N / M query heads that share a key head are stacked into
the rows of one block, r = g * block. Several key heads run together while their scores fit a cache.

Where positions count from 0, the keys that a block can see are known at trace time. Consecutive
blocks form at most `TIERS` tiers; all blocks of a tier take the same slice of keys, so that the
program stays small and at most a 16th of the S x S scores is computed without need. Where positions
are given, all blocks take all keys, and only the mask differs.

Batch and heads are looped over: call it on local arrays, in a `jax.shard_map`, rather than on
arrays sharded by the compiler. It is tuned on the CPU and runs everywhere.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels, OutGradient
from pallas_kernels.flash_attention.mask import Rules, Tokens, visible
from pallas_kernels.jax_versions import match_varying

# Queries in a block; twice as many in long rows, where larger products gain more than the keys
# that the first queries of a block could have left out.
BLOCK = 128
TIERS = 8
# Scores that are worked on at once: 2 MiB in float32, which stay in a cache.
MAX_SCORES = 2**19


class _Tier(NamedTuple):
    """Blocks of queries that take the same keys."""

    blocks: slice
    keys: slice


class _Queries(NamedTuple):
    """Arrays [blocks r ...] that belong to blocks of queries."""

    q: Array
    positions: Array
    segment_ids: Array | None


class _Keys(NamedTuple):
    """Arrays [U ...] that belong to keys."""

    k: Array
    v: Array
    positions: Array
    segment_ids: Array | None


class _XlaSizes(NamedTuple):
    b: int  # sequences
    s: int  # queries
    m: int  # key heads
    g: int  # query heads of one key head
    blocks: int
    block: int  # queries in a block

    @classmethod
    def of(cls, q: Array, k: Array) -> "_XlaSizes":
        (b, s, n, _), m = q.shape, k.shape[2]
        blocks = -(-s // max(BLOCK, min(2 * BLOCK, s // TIERS)))
        return cls(b, s, m, n // m, blocks, -(-s // blocks))

    def split(self, x: Array) -> Array:
        """Reshape [B S N ...] to [B*M blocks g*block ...], padded with zeros."""
        pad = self.blocks * self.block - self.s
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(self.b, self.blocks, self.block, self.m, self.g, *x.shape[3:])
        x = jnp.moveaxis(x, (3, 1, 4, 2), (1, 2, 3, 4))
        return x.reshape(self.b * self.m, self.blocks, self.g * self.block, *x.shape[5:])

    def join(self, x: Array) -> Array:
        """Undo `split`."""
        x = x.reshape(self.b, self.m, self.blocks, self.g, self.block, *x.shape[3:])
        x = jnp.moveaxis(x, (1, 2, 3, 4), (3, 1, 4, 2))
        x = x.reshape(self.b, self.blocks * self.block, self.m * self.g, *x.shape[5:])
        return x[:, : self.s]


def _tiers(sizes: _XlaSizes, num_keys: int, tokens: Tokens, rules: Rules) -> list[_Tier]:
    counts_from_0 = tokens.q_positions is None and tokens.kv_positions is None
    if not counts_from_0 or (not rules.causal and rules.window is None):
        return [_Tier(slice(0, sizes.blocks), slice(0, num_keys))]
    per_tier = -(-sizes.blocks // TIERS)
    tiers = []
    for first in range(0, sizes.blocks, per_tier):
        last = min(first + per_tier, sizes.blocks)
        # A window without causality reaches as far ahead as it does back.
        ahead = 0 if rules.causal or rules.window is None else rules.window - 1
        end = min(num_keys, last * sizes.block + ahead)
        back = 0 if rules.window is None else first * sizes.block - rules.window + 1
        start = max(0, min(back, end - 1))
        tiers.append(_Tier(slice(first, last), slice(start, end)))
    return tiers


def _prepare(operands: AttentionOperands) -> tuple[_XlaSizes, list[_Tier], _Queries, _Keys]:
    q, k, v, tokens, rules = operands
    sizes = _XlaSizes.of(q, k)
    num_keys = k.shape[1]

    def by_query(x: Array) -> Array:
        x = jnp.broadcast_to(x, (sizes.b, sizes.s))[:, :, None]
        return sizes.split(jnp.broadcast_to(x, (sizes.b, sizes.s, sizes.m * sizes.g)))

    def by_key(x: Array) -> Array:
        return jnp.repeat(jnp.broadcast_to(x, (sizes.b, num_keys)), sizes.m, axis=0)

    def heads_first(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(sizes.b * sizes.m, num_keys, x.shape[-1])

    q_positions, kv_positions, q_segment_ids, kv_segment_ids = tokens
    queries = _Queries(
        q=sizes.split(q),
        positions=by_query(jnp.arange(sizes.s) if q_positions is None else q_positions),
        segment_ids=None if q_segment_ids is None else by_query(q_segment_ids),
    )
    keys = _Keys(
        k=heads_first(k),
        v=heads_first(v),
        positions=by_key(jnp.arange(num_keys) if kv_positions is None else kv_positions),
        segment_ids=None if kv_segment_ids is None else by_key(kv_segment_ids),
    )
    return sizes, _tiers(sizes, num_keys, tokens, rules), queries, keys


def _per_head(function: Callable[..., Any], sizes: _XlaSizes, keys: _Keys, *queries: Any) -> Any:
    """Map function(keys, *queries) over the first dimension, a few key heads at a time."""
    heads = sizes.b * sizes.m
    fitting = MAX_SCORES // (sizes.g * sizes.block * keys.k.shape[1])
    together = max(c for c in range(1, heads + 1) if heads % c == 0 and c <= max(1, fitting))
    return jax.lax.map(lambda xs: function(*xs), (keys, *queries), batch_size=together)


def _pick(part: slice, record: Any) -> Any:
    return jax.tree.map(lambda x: x[part], record)


def _add_to(part: slice, total: Array, x: Array) -> Array:
    # Not total.at[part].add(x): that is a scatter, and it holds an empty array of indices, which
    # crashes XLA (jaxlib 0.11.2) when it travels into a manual region as a residual.
    return jax.lax.dynamic_update_slice_in_dim(total, total[part] + x, part.start, 0)


def _is_visible(queries: _Queries, keys: _Keys, rules: Rules) -> Array:
    return visible(rules, queries.positions, keys.positions, queries.segment_ids, keys.segment_ids)


def _cap(scores: Array, rules: Rules) -> Array:
    scores = rules.scale * scores
    return scores if rules.softcap is None else rules.softcap * jnp.tanh(scores / rules.softcap)


def _forward_block(block: _Queries, keys: _Keys, rules: Rules) -> tuple[Array, Array]:
    scores = jnp.einsum("rh,uh->ru", block.q, keys.k, preferred_element_type=jnp.float32)
    scores = jnp.where(_is_visible(block, keys, rules), _cap(scores, rules), -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    lse = (top + jnp.log(total))[:, 0]  # log(0) = -inf where a query sees no key
    weights = weights.astype(keys.v.dtype)
    out = jnp.einsum("ru,uh->rh", weights, keys.v, preferred_element_type=jnp.float32)
    return (out / jnp.where(total > 0, total, 1.0)).astype(block.q.dtype), lse


def _backward_block(
    block: _Queries, results: OutGradient, keys: _Keys, rules: Rules
) -> tuple[Array, Array, Array]:
    """Return the gradients of one block of queries and its parts of those of its keys, in float32.

    Scores are [U r] here, so that all five products take them without a transpose; as [r U], dK and
    dV would take twice the time on the CPU.
    """
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dtype = block.q.dtype
    scores = _cap(dot("uh,rh->ur", keys.k, block.q), rules)
    weights = jnp.exp(
        jnp.where(_is_visible(block, keys, rules).T, scores - results.lse[None], -jnp.inf)
    )
    d_scores = weights * (dot("uh,rh->ur", keys.v, results.d_out) - results.delta[None])
    if rules.softcap is not None:
        d_scores = d_scores * (1.0 - jnp.square(scores / rules.softcap))
    d_scores = (rules.scale * d_scores).astype(dtype)
    d_q = dot("hu,ur->hr", keys.k.T, d_scores).T
    d_k = dot("ur,rh->uh", d_scores, block.q)
    d_v = dot("ur,rh->uh", weights.astype(dtype), results.d_out)
    return d_q, d_k, d_v


def attend(operands: AttentionOperands) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns."""
    sizes, tiers, queries, keys = _prepare(operands)

    def one_head(keys: _Keys, queries: _Queries) -> tuple[Array, Array]:
        outs = []
        lses = []
        for tier in tiers:
            seen = _pick(tier.keys, keys)
            out, lse = jax.lax.map(
                lambda block, seen=seen: _forward_block(block, seen, operands.rules),
                _pick(tier.blocks, queries),
            )
            outs.append(out)
            lses.append(lse)
        return jnp.concatenate(outs), jnp.concatenate(lses)

    out, lse = map(sizes.join, _per_head(one_head, sizes, keys, queries))
    return out, lse.swapaxes(1, 2)


def differentiate(operands: AttentionOperands, gradient: OutGradient) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`."""
    sizes, tiers, queries, keys = _prepare(operands)
    d_out, lse, delta = gradient
    # Weights are 0 where a query sees no key; -inf would turn them into NaN.
    lse = jnp.where(jnp.isfinite(lse), lse, 0.0)
    lse, delta = (x.swapaxes(1, 2) for x in (lse, delta))
    results = OutGradient(*map(sizes.split, (d_out, lse, delta)))

    def zeros_like(keys: _Keys) -> tuple[Array, ...]:
        return tuple(match_varying(jnp.zeros(x.shape), x) for x in (keys.k, keys.v))

    def one_head(
        keys: _Keys, queries: _Queries, results: OutGradient
    ) -> tuple[Array, Array, Array]:
        d_qs = []
        d_k, d_v = zeros_like(keys)
        for tier in tiers:
            seen = _pick(tier.keys, keys)

            def step(sums, block, seen=seen):
                d_q, d_k, d_v = _backward_block(block[0], block[1], seen, operands.rules)
                return (sums[0] + d_k, sums[1] + d_v), d_q

            blocks = _pick(tier.blocks, (queries, results))
            (tier_d_k, tier_d_v), d_q = jax.lax.scan(step, zeros_like(seen), blocks)
            d_qs.append(d_q)
            d_k = _add_to(tier.keys, d_k, tier_d_k)
            d_v = _add_to(tier.keys, d_v, tier_d_v)
        return jnp.concatenate(d_qs), d_k, d_v

    d_q, d_k, d_v = _per_head(one_head, sizes, keys, queries, results)

    def heads_last(x: Array) -> Array:
        return x.reshape(sizes.b, sizes.m, *x.shape[1:]).swapaxes(1, 2)

    return sizes.join(d_q), heads_last(d_k), heads_last(d_v)


KERNELS = Kernels(attend, differentiate)
