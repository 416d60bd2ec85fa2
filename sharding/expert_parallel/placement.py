# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ExpertPlacement`: the device of every expert in every layer, as placement solvers return it.

    device_of[l, e]   device of expert e of layer l; every device has E/P experts of a layer
    order[l, i]       expert at position i: device c holds the positions c E/P to (c + 1) E/P - 1,
                      ascending by expert
    position[l, e]    position of expert e: the inverse of `order`

The weights of a layer are split over the mesh axis `expert` in the order of positions, so a
placement is applied by permuting them (`jaxmoe/contrib/placement/relocate.py`). The solvers are in
`jaxmoe/contrib/placement/`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertPlacement:
    """A device for every expert of every MoE layer.

    Raises:
        ValueError: A device that does not hold E/P experts of some layer.
    """

    device_of: Int[np.ndarray, "L E"]
    num_devices: int
    """Devices that share the experts of a layer, P."""

    def __post_init__(self):
        check_devices(self.num_experts, self.num_devices)
        share = self.num_experts // self.num_devices
        for layer, devices in enumerate(self.device_of):
            inside = devices[(devices >= 0) & (devices < self.num_devices)]
            totals = np.bincount(inside, minlength=self.num_devices)
            if (totals != share).any():
                device = int(np.argmax(totals != share))
                raise ValueError(
                    f"placement: device {device} holds {totals[device]} experts of layer"
                    f" {layer}, and"
                    f" every one of the {self.num_devices} must hold {share} of"
                    f" {self.num_experts}: the mesh cuts the experts into equal parts"
                )

    @classmethod
    def identity(cls, num_layers: int, num_experts: int, num_devices: int) -> ExpertPlacement:
        """Return the placement with experts in the order of their numbers, which is the default."""
        check_devices(num_experts, num_devices)
        devices = np.arange(num_experts) // (num_experts // num_devices)
        return cls(np.tile(devices, (num_layers, 1)), num_devices)

    @property
    def num_layers(self) -> int:
        """MoE layers, L."""
        return self.device_of.shape[0]

    @property
    def num_experts(self) -> int:
        """Experts of a layer, E."""
        return self.device_of.shape[1]

    @property
    def order(self) -> Int[np.ndarray, "L E"]:
        """Expert at each position."""
        return np.argsort(self.device_of, axis=1, kind="stable")

    @property
    def position(self) -> Int[np.ndarray, "L E"]:
        """Position of each expert."""
        return np.argsort(self.order, axis=1, kind="stable")


def check_devices(num_experts: int, num_devices: int) -> None:
    """Check that the number of devices divides the experts.

    Raises:
        ValueError: It does not; the message names both and the possible numbers.
    """
    if num_devices < 1 or num_experts % num_devices:
        divisors = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ValueError(
            f"placement: {num_devices} devices cannot hold equal parts of {num_experts} experts:"
            f" choose {', '.join(map(str, divisors))}"
        )
