# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The backward pass of ring attention: keys and values go round again, their gradients follow them.

With the log-sum-exp of the whole softmax every block gives its own part of the gradients (see
flash_attention/kernels.py). Queries stay, and so do theirs. The gradients of an owner's keys grow
from rank to rank in float32, a step behind the keys, and the last rank that needed them sends them
home, where the owner adds its own part.

Nothing but q, k, v, out and lse is kept from the forward pass.

With transport="remote_dma" all steps are one kernel (remote_dma/ring_backward.py) where those of
the forward pass are one, if it fits.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention.kernels import softmax_delta
from pallas_kernels.ring.remote_dma.ring_backward import differentiate_ring, fits
from pallas_kernels.ring.step import Parcel, differentiate_and_send, send
from pallas_kernels.ring_attention import shards
from pallas_kernels.ring_attention.shards import Cut, Ids, Ring


def differentiate(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S M H"],
    v: Float[Array, "B S M Hv"],
    ids: Ids,
    out: Float[Array, "B S N Hv"],
    lse: Float[Array, "B N S"],
    d_out: Float[Array, "B S N Hv"],
    d_lse: Float[Array, "B N S"],
    ring: Ring,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S M H"], Float[Array, "B S M Hv"]]:
    """Gradients of a rank's queries, keys and values, in float32.

    Args:
        q: of this rank, as all up to d_lse.
        k: keys.
        v: values.
        ids: of all ranks.
        out: of the forward pass.
        lse: likewise.
        d_out: gradient of the output.
        d_lse: gradient of the log-sum-exp.
        ring: how.
    """
    # Without the barrier the compiler sees that the forward pass has received the same keys, and
    # keeps those of all ranks until now instead of sending them again.
    q, k, v, d_out = jax.lax.optimization_barrier((q, k, v, d_out))
    rank = jax.lax.axis_index(ring.axis_name)
    how = {"axis_name": ring.axis_name, "transport": ring.transport, "kernels": ring.kernels}
    # Of a query that sees nothing lse is a constant.
    delta = softmax_delta(out, d_out) - jnp.where(jnp.isfinite(lse), d_lse, 0.0)
    if shards.is_one_kernel(ring) and fits(q, k, v, ring.rules):
        tokens = shards.numbered_tokens(ids, ring, rank, q.shape[1])
        arrays = (q, k, v, tokens, ring.rules, d_out, lse, delta)
        return differentiate_ring(*arrays, axis_name=ring.axis_name)
    own = shards.cut(shards.pack(k, v), ring)
    own_q = shards.zip_cuts(
        lambda *queries: queries,
        *(shards.cut(x, ring) for x in (q, d_out)),
        *(shards.cut(x, ring, tokens=2, heads=1) for x in (lse, delta)),
    )

    parcels = shards.key_parcels(ring, 0, own, shards.nothing(ring))
    tokens = shards.own_tokens(ids, ring, rank)
    found, arrived = differentiate_and_send(
        q, k, v, tokens, ring.rules_at(0), d_out, lse, delta, parcels, **how
    )
    d_q, d_own = shards.cut(found[0], ring), shards.cut(shards.pack(*found[1:]), ring)
    arrived, (d_q, d_own) = shards.paced(arrived, d_q, d_own)
    held = shards.arrived_keys(ring, 0, iter(arrived))
    sums = shards.nothing(ring)  # gradients of the keys that are held
    for step in range(1, ring.schedule.num_steps):
        queries, d_outs, lses, deltas = shards.by_block(ring, step, rank, "q", own_q)
        keys = shards.unpack(shards.by_block(ring, step, rank, "k", held), k.shape[-1])
        tokens = shards.block_tokens(ids, ring, step, rank)
        parcels = shards.key_parcels(ring, step, own, held) + _parcels(ring, step, sums)
        found, arrived = differentiate_and_send(
            queries, *keys, tokens, ring.rules_at(step), d_outs, lses, deltas, parcels, **how
        )
        arrived, (found,) = shards.paced(arrived, found)
        taken = iter(arrived)
        held = shards.arrived_keys(ring, step, taken)
        sums = _arrived_sums(ring, step, taken, d_own)
        _add_blocks(d_q, sums, found, ring, step, rank)
    if ring.schedule.num_steps > 1:
        last = ring.schedule.num_steps
        taken = iter(send(_parcels(ring, last, sums), ring.axis_name, ring.transport))
        _arrived_sums(ring, last, taken, d_own)

    return shards.join(d_q), *shards.unpack(shards.join(d_own), k.shape[-1])


def _parcels(ring: Ring, step: int, sums: Cut) -> list[Parcel]:
    return [Parcel(sums[at][hop.piece], hop.pairs) for at, hop in shards.gradient_hops(ring, step)]


def _arrived_sums(ring: Ring, step: int, taken: Iterator[Array], d_own: Cut) -> Cut:
    """The sums to which this rank adds next; those that have come home go to `d_own`."""
    sums = shards.nothing(ring)
    for at, hop in shards.gradient_hops(ring, step):
        shards.add(d_own if hop.is_at_home else sums, at, hop.piece, next(taken))
    return sums


def _add_blocks(
    d_q: Cut, sums: Cut, found: tuple[Array, ...], ring: Ring, step: int, rank: Array
) -> None:
    """Adds the blocks of a step to the pieces of queries and keys that they belong to."""
    for at, block, (one_q, *one_keys) in shards.blocks_of(ring, step, *found):
        pairs = list(zip(block.q, block.k, strict=True))
        for piece in sorted(set(block.q)):
            sees = [q == piece and k is not None for q, k in pairs]
            d_q[at][piece] += shards.where_rank(sees, rank, one_q, 0.0)
        for piece in sorted({k for k in block.k if k is not None}):
            sees = [k == piece for _, k in pairs]
            part = shards.where_rank(sees, rank, shards.pack(*one_keys), 0.0)
            shards.add(sums, at, piece, part)
