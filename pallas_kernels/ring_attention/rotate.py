# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sends keys and values around the ring beside the arithmetic: the loop of both passes.

The forward pass folds every block into softmax states; the backward pass adds up gradients and
sends those of the keys a step behind the keys. Both hand their part of a step to `rotate_keys`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.mask import Tokens
from pallas_kernels.ring.parcel import Parcel
from pallas_kernels.ring_attention import shards
from pallas_kernels.ring_attention.shards import Ids, KeyRing

Compute = Callable[[int, tuple[Array, Array], Tokens, list[Parcel]], tuple[Any, tuple[Array, ...]]]
"""(step, (keys, values), tokens, parcels to send) -> (result, arrays that arrived)."""

Absorb = Callable[[int, Any, Iterator[Array]], None]
"""(step, result, what arrived beside the keys): takes up the result of a step."""


def rotate_keys(
    k: Array,
    v: Array,
    ids: Ids,
    ring: KeyRing,
    compute: Compute,
    absorb: Absorb,
    passengers: Callable[[int], list[Parcel]] = lambda step: [],
) -> None:
    """Run all steps of a ring, own keys first, then the keys of one owner after the other.

    Args:
        k: Keys of this rank [B S M H].
        v: Values of this rank [B S M Hv].
        ids: Positions and segments of all ranks.
        ring: Static part of the call.
        compute: Arithmetic of a step; it sends the parcels.
        absorb: Called once per step, after the arithmetic.
        passengers: Parcels that travel beside the keys in a step.
    """
    rank = jax.lax.axis_index(ring.axis_name)
    local = shards.cut(shards.pack(k, v), ring)
    remote = shards.nothing(ring)
    for step in range(ring.schedule.num_steps):
        if step == 0:
            keys = (k, v)
            tokens = shards.own_tokens(ids, ring, rank)
        else:
            keys = shards.unpack(shards.by_block(ring, step, rank, "k", remote), k.shape[-1])
            tokens = shards.block_tokens(ids, ring, step, rank)
        parcels = shards.key_parcels(ring, step, local, remote) + passengers(step)
        results, arrived = compute(step, keys, tokens, parcels)
        arrived, results = shards.pace(arrived, results)
        incoming = iter(arrived)
        remote = shards.arrived_keys(ring, step, incoming)
        absorb(step, results, incoming)
