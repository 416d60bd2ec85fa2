# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of kernels for GPUs share: the watch for races, and a fault that it must see."""

import pytest

from pallas_kernels.gpu.hopper_parts import Registers
from pallas_kernels.jax_versions import mosaic_gpu

# JAX 0.11 says that it will drop Pallas through Triton one day.
triton_may_go = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

sees_races = pytest.mark.skipif(
    not hasattr(mosaic_gpu, "InterpretGPUParams"),
    reason="the interpreter of JAX 0.10 takes loads and copies by TMA to be in order",
)


def plant_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are given back before what was read of them is fenced."""

    def hasty(_, barrier, **__):
        mosaic_gpu.barrier_arrive(barrier)

    monkeypatch.setattr(Registers, "free", hasty)
