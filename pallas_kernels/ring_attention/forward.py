# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of ring attention: own tokens first, then one owner's keys after the other.

    (out, lse) = merge over owners of attention(q, k of owner, v of owner)

The state is merged in float32 (online_softmax.py); what a block returns is in the dtype of q.

With transport="remote_dma" all steps are one kernel (remote_dma/ring_forward.py) where at least 3/4
of the keys visit all ranks, one way round, and what it keeps fits the fast memory.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.ring.online_softmax import SoftmaxState, merge
from pallas_kernels.ring.remote_dma.ring_forward import attend_ring, fits
from pallas_kernels.ring.step import attend_and_send
from pallas_kernels.ring_attention import shards
from pallas_kernels.ring_attention.shards import Cut, Ids, Ring


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    ids: Ids,
    ring: Ring,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Attention of a rank's queries to the keys of all ranks.

    Args:
        q: of this rank, as k and v.
        k: keys.
        v: values.
        ids: of all ranks.
        ring: how.

    Returns:
        The output in the dtype of q, and the log-sum-exp in float32.
    """
    rank = jax.lax.axis_index(ring.axis_name)
    if shards.is_one_kernel(ring) and fits(q, k, v, ring.rules):
        tokens = shards.numbered_tokens(ids, ring, rank, q.shape[1])
        return attend_ring(q, k, v, tokens, ring.rules, axis_name=ring.axis_name)
    how = {"axis_name": ring.axis_name, "transport": ring.transport, "kernels": ring.kernels}
    own_q, own = shards.cut(q, ring), shards.cut(shards.pack(k, v), ring)

    parcels = shards.key_parcels(ring, 0, own, shards.nothing(ring))
    tokens = shards.own_tokens(ids, ring, rank)
    state, arrived = attend_and_send(q, k, v, tokens, ring.rules_at(0), parcels, **how)
    states = shards.zip_cuts(
        SoftmaxState,
        shards.cut(state.out.astype(jnp.float32), ring),
        shards.cut(state.lse, ring, tokens=2, heads=1),
    )
    arrived, (states,) = shards.paced(arrived, states)
    held = shards.arrived_keys(ring, 0, iter(arrived))
    for step in range(1, ring.schedule.num_steps):
        queries = shards.by_block(ring, step, rank, "q", own_q)
        keys = shards.unpack(shards.by_block(ring, step, rank, "k", held), k.shape[-1])
        tokens = shards.block_tokens(ids, ring, step, rank)
        parcels = shards.key_parcels(ring, step, own, held)
        state, arrived = attend_and_send(
            queries, *keys, tokens, ring.rules_at(step), parcels, **how
        )
        arrived, (state,) = shards.paced(arrived, state)
        held = shards.arrived_keys(ring, step, iter(arrived))
        _merge_blocks(states, state, ring, step, rank)

    out = shards.join([[piece.out for piece in route] for route in states])
    lse = shards.join([[piece.lse for piece in route] for route in states], tokens=2, heads=1)
    return out.astype(q.dtype), lse


def _merge_blocks(states: Cut, state: SoftmaxState, ring: Ring, step: int, rank: Array) -> None:
    """Merges the blocks of a step into the pieces of queries that they belong to."""
    for at, block, (out, lse) in shards.blocks_of(ring, step, *state):
        for piece in sorted(set(block.q)):
            sees = [q == piece and k is not None for q, k in zip(block.q, block.k, strict=True)]
            part = SoftmaxState(
                out.astype(jnp.float32), shards.where_rank(sees, rank, lse, -jnp.inf)
            )
            states[at][piece] = merge(states[at][piece], part)
