# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of a ring: attention over the block at hand while parcels travel between the ranks.

A parcel is an array and the static list of (from, to) ranks of the mesh axis between which it
travels, as for `jax.lax.ppermute`; a rank that nobody sends to finds zeros. What travels in a step
may depend on earlier steps only, so that no transport has to wait for the block's arithmetic:

    ppermute     XLA's collectives, on any backend; its scheduler moves them beside the arithmetic
    remote_dma   copies that the block's own TPU kernel starts and waits for (remote_dma/)

Ring attention (K and V travel) and token-ring attention (Q and results do) are built on these two
functions.

To add a transport: a branch in both functions, its name in `Transport`.
"""

import typing
from collections.abc import Sequence
from typing import Literal

import jax

from pallas_kernels.array_types import Array
from pallas_kernels.backend import platform
from pallas_kernels.flash_attention import OPERATION as FLASH_ATTENTION
from pallas_kernels.flash_attention.kernels import Kernels
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.flash_attention.tpu import kernels as pallas_tpu
from pallas_kernels.ring.online_softmax import SoftmaxState
from pallas_kernels.ring.parcel import Parcel
from pallas_kernels.ring.remote_dma import blocks as remote_dma

Transport = Literal["ppermute", "remote_dma"]


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
    if transport == "remote_dma":
        check_transport("attend_and_send", transport, kernels)
        state, arrived = remote_dma.attend(q, k, v, tokens, rules, parcels, axis_name)
        return SoftmaxState(*state), arrived
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
    if transport == "remote_dma":
        check_transport("differentiate_and_send", transport, kernels)
        return remote_dma.differentiate(
            q, k, v, tokens, rules, d_out, lse, delta, parcels, axis_name
        )
    arrived = send(parcels, axis_name)
    return kernels.differentiate(q, k, v, tokens, rules, d_out, lse, delta), arrived


def send(
    parcels: Sequence[Parcel], axis_name: str, transport: Transport = "ppermute"
) -> tuple[Array, ...]:
    """Nothing but the travelling, after the last block.

    Args:
        parcels: to be sent.
        axis_name: along which mesh axis.
        transport: how.
    """
    if transport == "remote_dma":
        return remote_dma.send(parcels, axis_name)
    return tuple(jax.lax.ppermute(x, axis_name, list(pairs)) for x, pairs in parcels)


def check_transport(name: str, transport: Transport, kernels: Kernels) -> None:
    """Refuses what cannot run, inside a manual region.

    Args:
        name: of the operation.
        transport: how parcels travel.
        kernels: of the implementation of the attention.

    Raises:
        ValueError: no such transport, devices without it, or an implementation that it cannot join.
    """
    if transport not in typing.get_args(Transport):
        names = ", ".join(map(repr, typing.get_args(Transport)))
        raise ValueError(f"{name}: transport={transport!r} must be one of {names}.")
    if transport == "ppermute":
        return
    if "pallas_tpu" not in FLASH_ATTENTION.runnable():
        raise ValueError(
            f"{name}: transport='remote_dma' needs TPUs, and this program is for {platform()}: "
            "choose transport='ppermute', which runs everywhere (to try it without TPUs, call it "
            "inside pallas_kernels.backend.interpreted())."
        )
    if kernels is not pallas_tpu.KERNELS:
        raise ValueError(
            f"{name}: transport='remote_dma' sends from within the kernels of "
            "implementation='pallas_tpu', and another one was chosen: leave implementation at None "
            "or name that one, or choose transport='ppermute'."
        )
