# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes one block of attention, or its gradients, while parcels travel between the ranks.

The kernels are those of flash_attention for TPUs, called by a `Sender`. The backward pass has two
kernels, and each sends about half of the bytes.
"""

from collections.abc import Sequence

from pallas_kernels.array_types import Array
from pallas_kernels.flash_attention.kernels import AttentionOperands, OutGradient
from pallas_kernels.flash_attention.tpu import backward as pallas_tpu_backward
from pallas_kernels.flash_attention.tpu import kernels as pallas_tpu
from pallas_kernels.ring.parcel import Parcel
from pallas_kernels.ring.remote_dma.transfer import Sender, send

__all__ = ["attend", "differentiate", "send"]


def attend(
    operands: AttentionOperands, parcels: Sequence[Parcel], axis_name: str
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """Return (out, lse) of a block, and what arrives; see `ring.step.attend_and_send`."""
    sender = Sender(parcels, axis_name)
    state = pallas_tpu.attend(operands, pallas_call=sender.pallas_call)
    return state, sender.arrivals


def differentiate(
    operands: AttentionOperands, gradient: OutGradient, parcels: Sequence[Parcel], axis_name: str
) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    """Return the gradients of a block, and what arrives; see `ring.step`."""
    sender = Sender(parcels, axis_name, num_kernels=2)
    gradients = pallas_tpu_backward.differentiate(
        operands, gradient, pallas_call=sender.pallas_call
    )
    return gradients, sender.arrivals
