# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of token_ring_attention.

Queries travel; (out, lse) of every block of keys comes home and is merged in float32. Blocks return
out in the dtype of q. In the direct form out travels home in the dtype of q and lse in float32; the
co-travelling form keeps float32 for both.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Float32
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.ring import half_blocks
from pallas_kernels.ring.gradient import RingInputs
from pallas_kernels.ring.online_softmax import SoftmaxState, merge
from pallas_kernels.ring.step import Parcel, attend_and_send
from pallas_kernels.token_ring_attention.blocks import QueryBlock
from pallas_kernels.token_ring_attention.circulate import QueryRing, Results, circulate
from pallas_kernels.token_ring_attention.messages import pack, unpack


def attend(
    inputs: RingInputs, ring: QueryRing
) -> tuple[Float[Array, "B S N Hv"], Float32[Array, "B N S"]]:
    """Return attention of the local queries to the keys of all ranks, and the log-sum-exp.

    Args:
        inputs: Arrays of this rank; positions and segments of its own.
        ring: Static part of the call.
    """
    q, k, v, shard = inputs
    pieces = len(ring.schedule.pieces)
    query_pieces = [
        (x, *tokens.arrays)
        for x, tokens in zip(jnp.split(q, pieces, axis=1), shard.split(pieces), strict=True)
    ]

    def work(
        step: int, query_pieces: Sequence[tuple[Array, ...]], carry: None, parcels: Sequence[Parcel]
    ):
        if step == 0:
            operands = AttentionOperands(q, k, v, shard.tokens, ring.rules)
        else:
            operands = QueryBlock.at(ring, step).operands(
                [x for x, *_ in query_pieces],
                k,
                v,
                [shard.like(leaves) for _, *leaves in query_pieces],
                shard,
            )
        state, arrived = attend_and_send(operands, parcels, ring.links)
        return state, carry, arrived

    states, _ = circulate(ring, query_pieces, work, _results(q, ring))
    out = jnp.concatenate([x.out for x in states], axis=1).astype(q.dtype)
    return out, jnp.concatenate([x.lse for x in states], axis=2)


def _results(q: Array, ring: QueryRing) -> Results:
    dtype = q.dtype if ring.schedule.form == "direct" else jnp.dtype(jnp.float32)
    pieces = len(ring.schedule.pieces)

    def by_piece(step: int, state: SoftmaxState) -> list[SoftmaxState]:
        if step > 0:
            return QueryBlock.at(ring, step).merge(state)
        outs = jnp.split(state.out.astype(jnp.float32), pieces, axis=1)
        lses = jnp.split(state.lse, pieces, axis=2)
        return [SoftmaxState(*piece) for piece in zip(outs, lses, strict=True)]

    def pack_state(state: SoftmaxState) -> Array:
        return pack(state.out.astype(dtype), state.lse)

    def unpack_state(message: Array, is_reached: Bool[Array, ""] | None) -> SoftmaxState:
        out, lse = unpack(message, q.shape[1] // pieces, dtype)
        state = SoftmaxState(out.astype(jnp.float32), lse)
        return state if is_reached is None else half_blocks.seen_if(is_reached, state)

    return Results(by_piece, merge, pack_state, unpack_state)
