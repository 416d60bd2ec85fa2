# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads measured links: rates of a chip by mesh axis, and the bandwidth between all hosts."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.network.links import LinkTable


def linked_chip(chip: Chip, table: LinkTable) -> Chip:
    """Return the chip with the rates of the axes that were measured.

    Args:
        chip: Properties of each device.
        table: Table of `jaxmoe doctor --links`.
    """
    rates = [(size.axis, table.axis_rate(size.axis)) for size in table.mesh]
    measured_rates = tuple((axis, rate) for axis, rate in rates if rate is not None)
    return dataclasses.replace(chip, rates=measured_rates)


def host_bandwidth(table: LinkTable) -> Float[np.ndarray, "H H"]:
    """Return the bytes per second from each process to each other: those of its slowest link.

    A process is a host of `processes.order`.

    Args:
        table: Table of `jaxmoe doctor --links --pairs processes`.

    Raises:
        ValueError: Two processes have no measured link.
    """
    process_of = dict(zip(table.devices, table.processes, strict=True))
    number = max(table.processes) + 1
    bandwidth = np.full((number, number), np.inf)
    for link in table.links:
        pair = process_of[link.source], process_of[link.target]
        if pair[0] != pair[1]:
            bandwidth[pair] = min(bandwidth[pair], table.rate(link).bandwidth)
    missing = np.isinf(bandwidth) & ~np.eye(number, dtype=bool)
    if missing.any():
        source, target = map(int, np.argwhere(missing)[0])
        raise ValueError(
            f"links: {int(missing.sum())} of {number * (number - 1)} pairs of processes were not"
            f" measured, such as {source} -> {target}: measure them with jaxmoe"
            " doctor --links --pairs processes"
        )
    return bandwidth
