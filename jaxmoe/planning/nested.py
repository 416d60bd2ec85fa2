# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prices three levels of sharding: weights, gradients and optimiser state over groups of groups.

With w | g | o | n devices in the groups of each, P parameters and b bytes per value in products,

    memory       b P / w + b P / g + 12 P / o        state: float32 parameters and two moments
    weights      2 (w - 1) / w P b over w            gathered forward and backward
    gradients    (g - 1) / g P b over g              scattered
                 (1 - g / o) P b / g over o          scattered on, each device its part of g
                 2 (1 - o / n) P b / o over n        summed over the copies of the state
    parameters   (1 / w - 1 / o) P b over o          gathered after the update

bytes that one device sends in a step, at the rate of the links that a group spans: a package, the
fast network, or the network between hosts. w = g = o = n is ZeRO-3. The idea is that of training on
Frontier (arXiv 2501.04266: die to die, in a node, between nodes); which level holds what is a
choice here, found by search. Activations are not counted. The layout `nested` carries out w with
g = o = n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jaxmoe.planning.hardware import Chip
from jaxmoe.planning.search.meshes import divisors

_STATE_BYTES = 12.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NestedSharding:
    """Devices of the group that shares each kind of training state."""

    weights: int
    """Weights in the dtype of products (w)."""
    gradients: int
    """Gradients (g), a multiple of w."""
    state: int
    """Optimiser state and float32 parameters (o), a multiple of g."""

    def memory(self, parameters: float, itemsize: int) -> float:
        """Return the bytes of training state on one device.

        Args:
            parameters: Values of the model (P).
            itemsize: Bytes per value in products (b).
        """
        narrow = itemsize / self.weights + itemsize / self.gradients
        return parameters * (narrow + _STATE_BYTES / self.state)

    def sent(self, parameters: float, itemsize: int, devices: int) -> dict[int, float]:
        """Return the bytes that a device sends in a step, by the devices that a group spans.

        Args:
            parameters: Values of the model (P).
            itemsize: Bytes per value in products (b).
            devices: Devices of the run (n).
        """
        num_bytes = parameters * itemsize
        w = self.weights
        g = self.gradients
        o = self.state
        parts = [
            (w, 2 * (1 - 1 / w)),
            (g, 1 - 1 / g),
            (o, (1 - g / o) / g),
            (devices, 2 * (1 - o / devices) / o),
            (o, 1 / w - 1 / o),
        ]
        bytes_by_size: dict[int, float] = {}
        for reach, share in parts:
            if share:
                bytes_by_size[reach] = bytes_by_size.get(reach, 0.0) + share * num_bytes
        return bytes_by_size

    def seconds(self, parameters: float, itemsize: int, devices: int, chip: Chip) -> float:
        """Return the seconds of the bytes that a device sends in a step.

        Args:
            parameters: Values of the model (P).
            itemsize: Bytes per value in products (b).
            devices: Devices of the run (n).
            chip: Properties of each device.
        """
        sent = self.sent(parameters, itemsize, devices)
        return sum(size / chip.bandwidth(reach) for reach, size in sent.items())


def nested_shardings(devices: int) -> Iterator[NestedSharding]:
    """Yield every choice of three groups.

    Args:
        devices: Devices of the run (n).
    """
    for state in divisors(devices):
        for gradients in divisors(state):
            for weights in divisors(gradients):
                yield NestedSharding(weights=weights, gradients=gradients, state=state)


def best_nested(
    parameters: float, itemsize: int, devices: int, chip: Chip, room: float
) -> NestedSharding | None:
    """Return the choice that sends for the least time within a memory; None if none fits.

    Args:
        parameters: Values of the model (P).
        itemsize: Bytes per value in products (b).
        devices: Devices of the run (n).
        chip: Properties of each device.
        room: Bytes of one device for training state.
    """
    fitting = [
        nested
        for nested in nested_shardings(devices)
        if nested.memory(parameters, itemsize) <= room
    ]
    return min(
        fitting,
        key=lambda nested: (
            nested.seconds(parameters, itemsize, devices, chip),
            nested.memory(parameters, itemsize),
        ),
        default=None,
    )
