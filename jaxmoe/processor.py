# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds out whether this CPU multiplies bfloat16 faster than float32.

It does with instructions for it (x86: avx512_bf16 or amx_bf16) and a JAX whose XLA uses them, 0.12
or newer: products take 1.9 to 3.6 times the rate of float32 there, and gain nothing on 0.10.

Several devices of a CPU (`--xla_force_host_platform_device_count`) stand in for accelerators, to
compare meshes with one device: they compute in float32.
"""

from __future__ import annotations

import functools
import pathlib

import jax

_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16"})
_CPUINFO = pathlib.Path("/proc/cpuinfo")


@functools.cache
def multiplies_bfloat16_fast() -> bool:
    """Return whether products in bfloat16 are faster than in float32 on this CPU."""
    return (
        jax.__version_info__ >= (0, 12)
        and jax.local_device_count("cpu") == 1
        and bool(_INSTRUCTIONS & instructions())
    )


def instructions() -> frozenset[str]:
    """Return the instruction sets of this CPU, as Linux names them; empty where it does not."""
    try:
        lines = _CPUINFO.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
