# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of a ring: attention over the block at hand while parcels travel between the ranks.

A parcel is an array and the static list of (from, to) ranks of the mesh axis between which it
travels, as for `jax.lax.ppermute`; a rank that nobody sends to finds zeros. What travels in a step
may depend on earlier steps only, so that no transport has to wait for the block's arithmetic:

    ppermute     XLA's collectives, on any backend; its scheduler moves them beside the arithmetic

Ring attention (K and V travel) and token-ring attention (Q and results do) are built on these two
functions.

To add a transport: a branch in both functions, its name in `Transport`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import Kernels
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.online_softmax import SoftmaxState

Transport = Literal["ppermute"]


class Parcel(NamedTuple):
    """Something on its way."""

    array: Array
    pairs: tuple[tuple[int, int], ...]
    """(from, to); no rank twice on either side."""


def attend_and_send(
    q: Array,
    k: Array,
    v: Array,
    tokens: Tokens,
    rules: Rules,
    parcels: Sequence[Parcel],
    *,
    axis_name: str,
    transport: Transport,
    kernels: Kernels,
) -> tuple[SoftmaxState, tuple[Array, ...]]:
    """Attention over one block of keys, and what has arrived meanwhile.

    Args:
        q: [B S N H], as k, v, tokens and rules for `flash_attention`.
        k: [B U M H].
        v: [B U M Hv].
        tokens: positions and segments.
        rules: of the mask.
        parcels: to be sent.
        axis_name: along which mesh axis.
        transport: how.
        kernels: of the implementation of the attention.
    """
    del transport
    arrived = send(parcels, axis_name)
    return SoftmaxState(*kernels.attend(q, k, v, tokens, rules)), arrived


def differentiate_and_send(
    q: Array,
    k: Array,
    v: Array,
    tokens: Tokens,
    rules: Rules,
    d_out: Array,
    lse: Array,
    delta: Array,
    parcels: Sequence[Parcel],
    *,
    axis_name: str,
    transport: Transport,
    kernels: Kernels,
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Gradients of one block, in float32, and what has arrived meanwhile.

    Args:
        q: [B S N H], as all up to delta for `Kernels.differentiate`.
        k: [B U M H].
        v: [B U M Hv].
        tokens: positions and segments.
        rules: of the mask.
        d_out: [B S N Hv].
        lse: [B N S], of the whole softmax.
        delta: [B N S], likewise.
        parcels: to be sent.
        axis_name: along which mesh axis.
        transport: how.
        kernels: of the implementation of the attention.
    """
    del transport
    arrived = send(parcels, axis_name)
    return kernels.differentiate(q, k, v, tokens, rules, d_out, lse, delta), arrived


def send(parcels: Sequence[Parcel], axis_name: str) -> tuple[Array, ...]:
    """Nothing but the travelling, by XLA's collectives."""
    return tuple(jax.lax.ppermute(x, axis_name, list(pairs)) for x, pairs in parcels)
