# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the compute capability of the GPU that a program is for, which may be only described.

To add a described GPU: its name in `_CAPABILITIES` of `pallas_kernels/gpu/capability.py`.
"""

import jax

from pallas_kernels.backend import platform

# By a part of the name of a described GPU, for lowering and compiling ahead of time.
_CAPABILITIES: dict[str, tuple[int, int]] = {
    "H100": (9, 0),
    "H200": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "A100": (8, 0),
    "A10": (8, 6),
    "L4": (8, 9),
    "RTX 6000": (8, 9),
    "B200": (10, 0),
    "B300": (10, 3),
}


def capability_or_none() -> tuple[int, int] | None:
    """Return the compute capability of the GPU that the program is for; None where it is not known
    or there is none."""
    try:
        return device_capability("")
    except ValueError:
        return None


def device_capability(operation: str) -> tuple[int, int] | None:
    """Return the compute capability of the GPU that the program is for.

    That is the GPU of the mesh in context, which may be only described, else the first of this
    process; None if it is not an NVIDIA GPU.

    Args:
        operation: Operation that needs it, for the message.

    Raises:
        ValueError: The described GPU is unknown, or the program is not for a GPU.
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None and platform() == "gpu":
        for name, capability in _CAPABILITIES.items():
            if name in described.device_kind:
                return capability
        raise ValueError(
            f"{operation}: the compute capability of a {described.device_kind!r} is not known; "
            f"describe one of {', '.join(_CAPABILITIES)}, or run on the GPU itself."
        )
    if platform() != "gpu":
        raise ValueError(
            f"{operation}: the kernels of 'pallas_gpu' need a gpu, and this program is for a "
            f"{platform()}: choose 'xla', or describe a GPU by the mesh in context."
        )
    version = getattr(jax.devices()[0], "compute_capability", "")
    major, _, minor = str(version).partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
