# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a compiled step from its kernels, one after the other.

    kernels         max(FLOPs / rate of their kind, bytes / rate of a copy)
    collectives     messages * latency + bytes / bandwidth of their axes, as `step_time` prices them
    step            the sum: nothing is hidden beside anything

Rates are those of `Chip.kernel_rates`, which were measured: a step is not compared with peaks that
no kernel reaches. The time between kernels is not counted.

To add a limit: `Limit` in `jaxmoe/planning/hlo/traffic.py`, and a field of `KernelRates` of the
same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.hlo import KernelTraffic
from jaxmoe.planning.mesh_axes import AxisBytes
from jaxmoe.planning.step_time import seconds_of
from jaxmoe.planning.traffic import Traffic


def kernel_seconds(row: KernelTraffic, chip: Chip) -> float:
    """Return the seconds of the kernels of one kind; 0 for collectives, which links bound.

    Args:
        row: Kernels of one kind.
        chip: Properties of each device.
    """
    if row.limit == "link":
        return 0.0
    rates = chip.kernel_rates
    moving = row.bytes / rates.copy
    return max(row.flops / getattr(rates, row.limit), moving) if row.flops else moving


def collective_seconds(traffic: Iterable[AxisBytes], mesh: Mapping[str, int], chip: Chip) -> float:
    """Return the seconds of the collectives of a compiled step, one after the other.

    Args:
        traffic: Collectives by kind and axes.
        mesh: Size by axis, in the order of the devices.
        chip: Properties of each device.
    """
    total = 0.0
    for row in traffic:
        num_devices = math.prod(mesh[axis] for axis in row.axes)
        sent = Traffic(
            reason=row.kind,
            axes=row.axes,
            num_devices=num_devices,
            bytes=row.wire_bytes,
            messages=row.count * (num_devices - 1),
        )
        total += seconds_of(sent, dict(mesh), chip)
    return total
