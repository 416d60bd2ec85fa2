# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the backward pass of ring attention: keys travel again, followed by their gradients.

With the log-sum-exp of the whole softmax every block gives its own part of the gradients (see
flash_attention/kernels.py). Queries and their gradients stay. The gradients of an owner's keys are
summed from rank to rank in float32, a step behind the keys; the last rank that needed the keys
sends the sum home, where the owner adds its own part.

Only q, k, v, out and lse are kept from the forward pass.

With transport="remote_dma" all steps are one kernel (ring/remote_dma/ring_backward.py) where the
forward pass is one kernel and this one fits VMEM too.
"""

from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient, softmax_delta
from pallas_kernels.ring.gradient import RingInputs
from pallas_kernels.ring.remote_dma.ring_backward import differentiate_ring, fits
from pallas_kernels.ring.step import Parcel, differentiate_and_send, send
from pallas_kernels.ring_attention import shards
from pallas_kernels.ring_attention.rotate import rotate_keys
from pallas_kernels.ring_attention.shards import Cut, KeyRing


def differentiate(
    inputs: RingInputs,
    out: Array,
    lse: Array,
    d_out: Array,
    ring: KeyRing,
    d_lse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Return the gradients of a rank's queries, keys and values, in float32.

    Args:
        inputs: Arrays of this rank; positions and segments of all ranks.
        out: Output of the forward pass.
        lse: Log-sum-exp of the forward pass.
        d_out: Gradient of the output.
        ring: Static part of the call.
        d_lse: Gradient of the log-sum-exp; None where it is not a result.
    """
    q, k, v, ids = inputs
    # Without the barrier the compiler sees that the forward pass has received the same keys, and
    # keeps those of all ranks until now instead of sending them again.
    q, k, v, d_out = jax.lax.optimization_barrier((q, k, v, d_out))
    rank = jax.lax.axis_index(ring.axis_name)
    delta = softmax_delta(out, d_out)
    if d_lse is not None:
        delta = delta - d_lse
    if shards.is_one_kernel(ring) and fits(q, k, v, ring.rules):
        tokens = shards.numbered_tokens(ids, ring, rank, q.shape[1])
        operands = AttentionOperands(q, k, v, tokens, ring.rules)
        gradient = OutGradient(d_out, lse, delta)
        return differentiate_ring(operands, gradient, axis_name=ring.axis_name)
    own_q = shards.zip_cuts(
        lambda *queries: queries,
        *(shards.cut(x, ring) for x in (q, d_out)),
        *(shards.cut(x, ring, tokens=2, heads=1) for x in (lse, delta)),
    )
    d_q: Cut = []
    d_own: Cut = []
    sums = shards.nothing(ring)  # gradients of the keys that are held

    def compute(step: int, keys: tuple[Array, Array], tokens: Any, parcels: Any) -> Any:
        queries = (q, d_out, lse, delta)
        if step > 0:
            queries = shards.by_block(ring, step, rank, "q", own_q)
        q_, *gradient = queries
        operands = AttentionOperands(q_, *keys, tokens, ring.rules_at(step))
        gradients, arrived = differentiate_and_send(
            operands, OutGradient(*gradient), parcels, ring.links
        )
        if step == 0:
            return (
                shards.cut(gradients[0], ring),
                shards.cut(shards.pack(*gradients[1:]), ring),
            ), arrived
        return gradients, arrived

    def absorb(step: int, gradients: Any, incoming: Iterator[Array]) -> None:
        nonlocal sums
        if step == 0:
            d_q.extend(gradients[0])
            d_own.extend(gradients[1])
            return
        sums = _arrived_sums(ring, step, incoming, d_own)
        _add_blocks(d_q, sums, gradients, ring, step, rank)

    rotate_keys(k, v, ids, ring, compute, absorb, lambda step: _parcels(ring, step, sums))
    if ring.schedule.num_steps > 1:
        last = ring.schedule.num_steps
        axis_name, transport, _ = ring.links
        incoming = iter(send(_parcels(ring, last, sums), axis_name, transport))
        _arrived_sums(ring, last, incoming, d_own)

    return shards.join(d_q), *shards.unpack(shards.join(d_own), k.shape[-1])


def _parcels(ring: KeyRing, step: int, sums: Cut) -> list[Parcel]:
    return [Parcel(sums[at][hop.piece], hop.pairs) for at, hop in shards.gradient_hops(ring, step)]


def _arrived_sums(ring: KeyRing, step: int, parcels: Iterator[Array], d_own: Cut) -> Cut:
    """Return the sums to which this rank adds next; sums that have come home go to `d_own`."""
    sums = shards.nothing(ring)
    for at, hop in shards.gradient_hops(ring, step):
        shards.add(d_own if hop.is_at_home else sums, at, hop.piece, next(parcels))
    return sums


def _add_blocks(
    d_q: Cut, sums: Cut, gradients: tuple[Array, ...], ring: KeyRing, step: int, rank: Array
) -> None:
    """Add the blocks of a step to the pieces of queries and keys that they belong to."""
    for at, block, (one_q, *one_keys) in shards.blocks_of(ring, step, *gradients):
        pairs = list(zip(block.q, block.k, strict=True))
        for piece in sorted(set(block.q)):
            sees = [q == piece and k is not None for q, k in pairs]
            d_q[at][piece] += shards.where_rank(sees, rank, one_q, 0.0)
        for piece in sorted({k for k in block.k if k is not None}):
            sees = [k == piece for _, k in pairs]
            part = shards.where_rank(sees, rank, shards.pack(*one_keys), 0.0)
            shards.add(sums, at, piece, part)
