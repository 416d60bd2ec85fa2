# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes attention over one block of keys while parcels travel between the ranks of a ring.

A parcel is an array with a static list of (from, to) ranks, as for `jax.lax.ppermute`; a rank that
receives nothing gets zeros. What travels in a step depends on earlier steps only, so that no
transport waits for the arithmetic of the step:

    ppermute     XLA collectives, on any backend; XLA schedules them beside the arithmetic
    remote_dma   copies that the TPU kernel of the block starts and waits for (ring/remote_dma/)

Ring attention (keys and values travel) and token-ring attention (queries and results travel) use
these functions in both passes.

To add a transport: its name in `Transport` and a branch in the functions of
`pallas_kernels/ring/step.py`, a row in `tests/pallas_kernels/ring/test_remote_dma.py`.
"""

import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from pallas_kernels.array_types import Array
from pallas_kernels.backend import platform
from pallas_kernels.flash_attention.api import KERNELS
from pallas_kernels.flash_attention.api import OPERATION as FLASH_ATTENTION
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels, OutGradient
from pallas_kernels.ring.online_softmax import SoftmaxState
from pallas_kernels.ring.parcel import Parcel
from pallas_kernels.ring.remote_dma import blocks as remote_dma

Transport = Literal["ppermute", "remote_dma"]
AxisName = str | tuple[str, ...]
"""Mesh axis of a ring, or several that form one, the slowest first."""


class Links(NamedTuple):
    """How the ranks of a ring exchange parcels and compute blocks; hashable."""

    axis_name: Any
    """`AxisName` of the ring; one mesh axis for remote_dma."""
    transport: Transport
    """Transport of the parcels."""
    kernels: Kernels
    """Implementation of flash_attention for the blocks."""


def attend_and_send(
    operands: AttentionOperands,
    parcels: Sequence[Parcel],
    links: Links,
) -> tuple[SoftmaxState, tuple[Array, ...]]:
    """Return attention over one block of keys, and the arrays that arrive meanwhile.

    Args:
        operands: Queries, keys and values of the block, and its mask.
        parcels: Arrays to send.
        links: Mesh axis, transport and implementation.
    """
    axis_name, transport, kernels = links
    if transport == "remote_dma":
        check_transport("attend_and_send", transport, kernels)
        state, arrived = remote_dma.attend(operands, parcels, axis_name)
        return SoftmaxState(*state), arrived
    arrived = send(parcels, axis_name)
    return SoftmaxState(*kernels.attend(operands)), arrived


def differentiate_and_send(
    operands: AttentionOperands,
    gradient: OutGradient,
    parcels: Sequence[Parcel],
    links: Links,
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Return the gradients of one block in float32, and the arrays that arrive meanwhile.

    Args:
        operands: Queries, keys and values of the block, and its mask.
        gradient: Gradient of the output, and numbers of the whole softmax.
        parcels: Arrays to send.
        links: Mesh axis, transport and implementation.
    """
    axis_name, transport, kernels = links
    if transport == "remote_dma":
        check_transport("differentiate_and_send", transport, kernels)
        return remote_dma.differentiate(operands, gradient, parcels, axis_name)
    arrived = send(parcels, axis_name)
    return kernels.differentiate(operands, gradient), arrived


def send(
    parcels: Sequence[Parcel], axis_name: Any, transport: Transport = "ppermute"
) -> tuple[Array, ...]:
    """Send parcels without computing anything, and return the arrays that arrive.

    Args:
        parcels: Arrays to send.
        axis_name: Mesh axis of the ring.
        transport: Transport of the parcels.
    """
    if transport == "remote_dma":
        return remote_dma.send(parcels, axis_name)
    return tuple(jax.lax.ppermute(x, axis_name, list(pairs)) for x, pairs in parcels)


def check_transport(name: str, transport: str, kernels: Kernels) -> None:
    """Raise if a transport cannot run here; call it inside a manual region.

    Args:
        name: Operation, for the message.
        transport: Transport asked for.
        kernels: Implementation of flash_attention for the blocks.

    Raises:
        ValueError: The transport is unknown, needs other devices, or needs other kernels.
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
            "inside pallas_kernels.interpreter.interpret_kernels())."
        )
    if kernels is not KERNELS["pallas_tpu"]:
        raise ValueError(
            f"{name}: transport='remote_dma' sends from within the kernels of "
            "implementation='pallas_tpu', and another one was chosen: leave implementation at None "
            "or name that one, or choose transport='ppermute'."
        )
