# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Chooses between the Hopper and the Triton kernel of an operation on an NVIDIA GPU.

    Hopper   Mosaic GPU, with WGMMA and TMA: compute capability 9.0 only
    Triton   compute capability 8.0 and later

Each operation adds what its own Hopper kernels take. The choice is a pure function of the GPU and
of shapes and dtypes.
"""

from typing import NamedTuple

from pallas_kernels.gpu.capability import capability_or_none

OLDEST = (8, 0)
"""Compute capability that every kernel of this package needs."""


class KernelChoice(NamedTuple):
    """A kernel and the reason why it runs."""

    kernel: str
    """Module name in the `gpu` folder of the operation; "xla" for no kernel of this package."""
    reason: str


def choose_kernel(
    capability: tuple[int, int],
    against_hopper: str | None,
    *,
    hopper: str = "hopper",
    because: str = "has WGMMA and TMA",
) -> KernelChoice:
    """Return the Hopper kernel where it can run, else the Triton kernel.

    Args:
        capability: Compute capability, (9, 0) for Hopper; at least `OLDEST`.
        against_hopper: Reason why the operation's Hopper kernels cannot run; None if they can.
        hopper: Name of the Hopper kernel.
        because: Reason for it, after "compute capability 9.0".
    """
    description = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] != 9:
        return KernelChoice("triton", f"{description} has no WGMMA, which only 9.0 has")
    if against_hopper is not None:
        return KernelChoice("triton", against_hopper)
    return KernelChoice(hopper, f"{description} {because}")


def reason_against_gpu(capability: tuple[int, int] | None) -> str | None:
    """Return why no kernel of this package runs on a GPU; None if one does.

    Args:
        capability: Compute capability; None if the GPU is not an NVIDIA GPU.
    """
    if capability is not None and capability >= OLDEST:
        return None
    have = "no NVIDIA GPU" if capability is None else f"{capability[0]}.{capability[1]}"
    return f"the kernels need an NVIDIA GPU of compute capability 8.0 or later, this is {have}"


def reason_against_this_gpu() -> str | None:
    """Return why no kernel of this package runs on the GPU that the program is for."""
    return reason_against_gpu(capability_or_none())
