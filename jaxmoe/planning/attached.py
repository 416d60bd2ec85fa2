# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares the memory that a train step needs with that of the attached devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jaxmoe.host_memory import machine_memory
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import CHIPS, Chip
from jaxmoe.planning.memory import estimate_memory

logger = logging.getLogger(__name__)

_KINDS = (
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v6 lite", "v6e"),
    ("v6e", "v6e"),
    ("v5", "v5p"),
    *((name, name) for name in CHIPS),
)
"""Parts of the names of device kinds, with their row of CHIPS; the first that fits counts."""


def attached_chip(device: Any) -> Chip:
    """Return the row of CHIPS of a device; that of a CPU, with a warning, if there is none.

    Args:
        device: A `jax.Device`.
    """
    if device.platform == "cpu":
        return CHIPS["cpu"]
    kind = device.device_kind.lower()
    name = next((name for part, name in _KINDS if part in kind), None)
    if name is None:
        logger.warning("%s is not in the table of chips: costs are those of a CPU", kind)
    return CHIPS[name or "cpu"]


def memory_warning(plan: StepPlan, devices: Sequence[Any]) -> str:
    """Return why a train step will probably not fit the devices of this process; empty if it fits.

    Args:
        plan: Step with its mesh.
        devices: `jax.Device`s of this process. Those of a CPU share the memory of the machine;
            those whose memory JAX does not report always fit.
    """
    platform = devices[0].platform
    name = platform if platform in ("tpu", "cpu") else "gpu"
    if name == "cpu":
        number = len(devices)
        available = machine_memory()
        owner = "this machine has"
    else:
        limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
        number = 1
        available = min(limits)
        owner = "a device has"
    memory = estimate_memory(plan, name)
    needed = number * memory.total
    if not available or needed <= available:
        return ""
    largest = sorted(memory.categories().items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{part} {_gigabytes(number * size)}" for part, size in largest)
    each = "a device" if number == 1 else f"{number} devices"
    return (
        f"this run will probably not fit: a train step needs about {_gigabytes(needed)} on {each}"
        f" ({parts}), and {owner} {_gigabytes(available)}. Choose a smaller model, more"
        " training.accumulation, execution.remat=full or more devices; `jaxmoe plan` finds a"
        " mesh"
    )


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB"
