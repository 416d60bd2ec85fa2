# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the forward pass of ring attention.

    (out, lse) = merge over owners of attention(q, k of owner, v of owner)

The state is merged in float32 (ring/online_softmax.py); blocks return out in the dtype of q.

With transport="remote_dma" all steps are one kernel (ring/remote_dma/ring_forward.py) where at
least 3/4 of the keys visit all ranks, one way round, and the kernel's arrays fit VMEM.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import AttentionOperands
from pallas_kernels.ring.gradient import RingInputs
from pallas_kernels.ring.online_softmax import SoftmaxState, merge
from pallas_kernels.ring.remote_dma.ring_forward import attend_ring, fits
from pallas_kernels.ring.step import attend_and_send
from pallas_kernels.ring_attention import shards
from pallas_kernels.ring_attention.rotate import rotate_keys
from pallas_kernels.ring_attention.shards import Cut, KeyRing


def attend(
    inputs: RingInputs, ring: KeyRing
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return attention of a rank's queries to the keys of all ranks.

    Args:
        inputs: Arrays of this rank; positions and segments of all ranks.
        ring: Static part of the call.

    Returns:
        The output in the dtype of q, and the log-sum-exp in float32.
    """
    q, k, v, ids = inputs
    rank = jax.lax.axis_index(ring.axis_name)
    if shards.is_one_kernel(ring) and fits(q, k, v, ring.rules):
        tokens = shards.numbered_tokens(ids, ring, rank, q.shape[1])
        return attend_ring(AttentionOperands(q, k, v, tokens, ring.rules), axis_name=ring.axis_name)
    own_q = shards.cut(q, ring)
    states: Cut = []

    def compute(step: int, keys: tuple[Array, Array], tokens: Any, parcels: Any) -> Any:
        queries = q if step == 0 else shards.by_block(ring, step, rank, "q", own_q)
        operands = AttentionOperands(queries, *keys, tokens, ring.rules_at(step))
        state, arrived = attend_and_send(operands, parcels, ring.links)
        return (_by_piece(state, ring) if step == 0 else state), arrived

    def absorb(step: int, block_states: Any, incoming: Any) -> None:
        if step == 0:
            states.extend(block_states)
        else:
            _merge_blocks(states, block_states, ring, step, rank)

    rotate_keys(k, v, ids, ring, compute, absorb)
    out = shards.join([[piece.out for piece in route] for route in states])
    lse = shards.join([[piece.lse for piece in route] for route in states], tokens=2, heads=1)
    return out.astype(q.dtype), lse


def _by_piece(state: SoftmaxState, ring: KeyRing) -> Cut:
    return shards.zip_cuts(
        SoftmaxState,
        shards.cut(state.out.astype(jnp.float32), ring),
        shards.cut(state.lse, ring, tokens=2, heads=1),
    )


def _merge_blocks(states: Cut, state: SoftmaxState, ring: KeyRing, step: int, rank: Array) -> None:
    """Merge the blocks of a step into the pieces of queries that they belong to."""
    for at, block, (out, lse) in shards.blocks_of(ring, step, *state):
        for piece in sorted(set(block.q)):
            sees = [q == piece and k is not None for q, k in zip(block.q, block.k, strict=True)]
            part = SoftmaxState(
                out.astype(jnp.float32), shards.where_rank(sees, rank, lse, -jnp.inf)
            )
            states[at][piece] = merge(states[at][piece], part)
