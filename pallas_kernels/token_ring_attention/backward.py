# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the backward pass of token_ring_attention: queries travel once more.

TokenRing (arXiv 2412.20501) has no backward pass. With the log-sum-exp of the whole softmax and
delta = sum(dO * O), both known at home, a block of keys has its own part of the gradient
(flash_attention/kernels.py). (Q, lse) and (dO, delta) take the route of the queries; dK and dV stay
with the keys and are summed there; dQ, in float32, takes the route of the results.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
from pallas_kernels.ring.gradient import RingInputs
from pallas_kernels.ring.step import Parcel, differentiate_and_send
from pallas_kernels.token_ring_attention.blocks import QueryBlock
from pallas_kernels.token_ring_attention.circulate import QueryRing, Results, circulate
from pallas_kernels.token_ring_attention.messages import pack, unpack


def differentiate(
    inputs: RingInputs,
    out: Array,
    lse: Array,
    d_out: Array,
    ring: QueryRing,
    d_lse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of the local shards, in float32.

    Args:
        inputs: Arrays of this rank; positions and segments of its own.
        out: Output of the forward pass.
        lse: Log-sum-exp of the forward pass.
        d_out: Gradient of the output.
        ring: Static part of the call.
        d_lse: Gradient of the log-sum-exp; None where it is not a result.
    """
    q, k, v, shard = inputs
    pieces = len(ring.schedule.pieces)
    length = q.shape[1] // pieces
    delta = softmax_delta(out, d_out)
    if d_lse is not None:
        delta = delta - d_lse
    # One message holds arrays of one width.
    is_joint = q.shape[-1] == d_out.shape[-1]

    def pack_queries(q: Array, lse: Array, d_out: Array, delta: Array) -> tuple[Array, ...]:
        if not is_joint:
            return pack(q, lse), pack(d_out, delta)
        stacked = jnp.concatenate([q, d_out], axis=1), jnp.concatenate([lse, delta], axis=2)
        return (pack(*stacked),)

    def unpack_queries(messages: Sequence[Array]) -> tuple[Array, Array, Array, Array]:
        if not is_joint:
            (q_, lse_), (d_out_, delta_) = (unpack(x, length, q.dtype) for x in messages)
            return q_, lse_, d_out_, delta_
        heads, numbers = unpack(messages[0], 2 * length, q.dtype)
        (q_, d_out_), (lse_, delta_) = jnp.split(heads, 2, axis=1), jnp.split(numbers, 2, axis=2)
        return q_, lse_, d_out_, delta_

    split = [jnp.split(x, pieces, axis=a) for x, a in ((q, 1), (lse, 2), (d_out, 1), (delta, 2))]
    query_pieces = [
        (*pack_queries(*queries), *tokens.arrays)
        for queries, tokens in zip(zip(*split, strict=True), shard.split(pieces), strict=True)
    ]
    messages = 1 if is_joint else 2

    def work(
        step: int,
        query_pieces: Sequence[tuple[Array, ...]],
        key_sums: Any,
        parcels: Sequence[Parcel],
    ):
        if step == 0:
            operands = AttentionOperands(q, k, v, shard.tokens, ring.rules)
            gradient = (d_out, lse, delta)
            (d_q, *d_keys), arrived = differentiate_and_send(
                operands, OutGradient(*gradient), parcels, ring.links
            )
            return d_q, d_keys, arrived
        block = QueryBlock.at(ring, step)
        queries = [unpack_queries(x[:messages]) for x in query_pieces]
        heads, lse_, d_out_, delta_ = zip(*queries, strict=True)
        tokens = [shard.like(x[messages:]) for x in query_pieces]
        gradient = (block.queries(x) for x in (d_out_, lse_, delta_))
        (d_q, *d_keys), arrived = differentiate_and_send(
            block.operands(heads, k, v, tokens, shard),
            OutGradient(*gradient),
            parcels,
            ring.links,
        )
        sums = [a + block.summed_keys(b) for a, b in zip(key_sums, d_keys, strict=True)]
        return d_q, sums, arrived

    def by_piece(step: int, d_q: Array) -> list[Array]:
        if step > 0:
            return QueryBlock.at(ring, step).summed_queries(d_q)
        return jnp.split(d_q, pieces, axis=1)

    plain = Results(by_piece, jnp.add, pack=lambda x: x, unpack=lambda x, is_reached: x)
    d_q, (d_k, d_v) = circulate(ring, query_pieces, work, plain)
    return jnp.concatenate(d_q, axis=1), d_k, d_v
