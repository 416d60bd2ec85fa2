# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the two unmasked half blocks of a step between two ranks of a zigzag layout.

Rank r holds pieces r (its low half) and 2N - 1 - r (its high half) of 2N pieces. Between the
queries of one rank and the keys of another, causality leaves exactly two blocks of half by half,
all of which is visible:

    A = high queries x low keys
    B = low queries x low keys     if the queries' rank is the later one
        high queries x high keys   if it is the earlier one

Both blocks are stacked in the batch dimension, so that a step is one call without a causal mask or
a branch, of the same shape on every rank. Arrays have the batch first; halves are (low, high).

Segments and windows are masked by the attention, with tokens stacked in the same way.
"""

from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Shaped
from pallas_kernels.ring.online_softmax import SoftmaxState, merge


class HalfBlocks(NamedTuple):
    """Low and high half of an array of a rank."""

    low: Array
    high: Array


def halves(x: Array) -> HalfBlocks:
    """Split an array [B S ...] with an even number of positions."""
    return HalfBlocks(*jnp.split(x, 2, axis=1))


def stack_queries(x: HalfBlocks, is_earlier: Bool[Array, ""]) -> Shaped[Array, "..."]:
    """Return the query halves of blocks A and B, stacked to [2B ...].

    Args:
        x: Halves of the queries, or of an array that belongs to them.
        is_earlier: Whether the rank of the queries comes before the rank of the keys.
    """
    return jnp.concatenate([x.high, jnp.where(is_earlier, x.high, x.low)])


def stack_keys(x: HalfBlocks, is_earlier: Bool[Array, ""]) -> Shaped[Array, "..."]:
    """Return the key halves of blocks A and B, stacked to [2B ...].

    Args:
        x: Halves of the keys, or of an array that belongs to them.
        is_earlier: Whether the rank of the queries comes before the rank of the keys.
    """
    return jnp.concatenate([x.low, jnp.where(is_earlier, x.high, x.low)])


def sum_queries(stacked: Array, is_earlier: Bool[Array, ""]) -> HalfBlocks:
    """Return the sums of both blocks by half of the queries; the transpose of `stack_queries`."""
    a, b = jnp.split(stacked, 2)
    return HalfBlocks(_only(~is_earlier, b), a + _only(is_earlier, b))


def sum_keys(stacked: Array, is_earlier: Bool[Array, ""]) -> HalfBlocks:
    """Return the sums of both blocks by half of the keys; the transpose of `stack_keys`."""
    a, b = jnp.split(stacked, 2)
    return HalfBlocks(a + _only(~is_earlier, b), _only(is_earlier, b))


def merge_queries(
    stacked: SoftmaxState, is_earlier: Bool[Array, ""]
) -> tuple[SoftmaxState, SoftmaxState]:
    """Return the softmax states of the low and high queries after both blocks, in float32.

    Args:
        stacked: Attention over both blocks.
        is_earlier: Whether the rank of the queries comes before the rank of the keys.
    """
    out, lse = (jnp.split(x.astype(jnp.float32), 2) for x in stacked)
    a = SoftmaxState(out[0], lse[0])
    b = SoftmaxState(out[1], lse[1])
    return seen_if(~is_earlier, b), merge(a, seen_if(is_earlier, b))


def seen_if(condition: Bool[Array, ""], state: SoftmaxState) -> SoftmaxState:
    """Return the state where the condition holds, else the state that has seen no key."""
    lse = jnp.where(condition, state.lse, -jnp.inf)
    return SoftmaxState(_only(condition, state.out), lse)


def _only(condition: Array, x: Array) -> Array:
    return jnp.where(condition, x, jnp.zeros_like(x))
