# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Support for tests of GPU kernels: the race detector, and a race that it must report."""

import importlib
from typing import Any

import pytest

from pallas_kernels.gpu.hopper_parts import Registers
from pallas_kernels.jax_versions import mosaic_gpu

# JAX 0.11 deprecates Pallas through Triton.
triton_may_go = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

sees_races = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "InterpretGPUParams"),
    reason="the interpreter of JAX 0.10 takes loads and copies by TMA to be in order",
)


def plant_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: give slots back before reads are fenced."""

    def hasty(_, barrier, **__):
        mosaic_gpu.barrier_arrive(barrier)

    monkeypatch.setattr(Registers, "free", hasty)


def interpreted_gpu(**options: Any) -> Any:
    """Return what makes `plgpu.kernel(interpret=...)` run on the CPU; public from jax 0.11 on."""
    if hasattr(mosaic_gpu, "InterpretGPUParams"):
        return mosaic_gpu.InterpretGPUParams(**options)
    private = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return private.InterpretGPUParams(**options)
