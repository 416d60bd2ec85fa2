# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures a placement: traffic between layers, load of the devices, local assignments.

    crossings     sum over layers of affinity[l, a, b] with a and b on different devices
    pair traffic  the same for each pair of devices, both directions
    imbalance     sum over layers and devices of |load - mean load of the layer's devices|
    local share   share of assignments with expert and token on the same device

Crossings and pair traffic assume tokens that stay on the device of their last expert (ExFlow); the
local share assumes tokens placed before they are dispatched (Speculative MoE).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement

Devices = Int[np.ndarray, "L E"]


def flows(
    affinity: Int[np.ndarray, "M E E"], device_of: Devices, num_devices: int
) -> Int[np.ndarray, "M P P"]:
    """Return the pairs of slots from each device to each device, between adjacent layers."""
    is_on = np.eye(num_devices, dtype=affinity.dtype)[device_of]  # L, E, P
    # Two matrix products: an einsum over three arrays is slow.
    return is_on[:-1].swapaxes(1, 2) @ affinity @ is_on[1:]


def crossings(affinity: Int[np.ndarray, "M E E"], device_of: Devices) -> int:
    """Return the number of pairs of slots with experts on different devices."""
    is_apart = device_of[:-1, :, None] != device_of[1:, None, :]
    return int(np.sum(affinity, where=is_apart))


def pair_traffic(flow: Int[np.ndarray, "M P P"]) -> Float[np.ndarray, "P P"]:
    """Return the traffic of each pair of devices; upper triangle.

    Args:
        flow: Result of `flows`.
    """
    total = flow.sum(0).astype(float)
    return np.triu(total + total.T, 1)


def imbalance(loads: Int[np.ndarray, "L E"], device_of: Devices, num_devices: int) -> float:
    """Return |load - mean load| summed over devices and layers."""
    device_totals = device_loads(loads, device_of, num_devices)
    return float(np.abs(device_totals - device_totals.mean(1, keepdims=True)).sum())


def device_loads(
    loads: Int[np.ndarray, "L E"], device_of: Devices, num_devices: int
) -> Int[np.ndarray, "L P"]:
    """Return the assignments of each layer on each device."""
    is_on = np.eye(num_devices, dtype=loads.dtype)[device_of]
    return (loads[:, None, :] @ is_on)[:, 0]


def experts_devices(trace: RoutingTrace, placement: ExpertPlacement) -> Int[np.ndarray, "L T K"]:
    """Return the device of each assignment; P for an empty slot."""
    padded = np.pad(placement.device_of, ((0, 0), (0, 1)), constant_values=placement.num_devices)
    return np.stack([padded[layer][ids] for layer, ids in enumerate(trace.expert_ids)])


def homes(trace: RoutingTrace, placement: ExpertPlacement) -> Int[np.ndarray, "L T"]:
    """Return the device with most of a token's experts, the lowest of equals; -1 for none."""
    devices = experts_devices(trace, placement)
    num_by_device = np.stack([(devices == c).sum(-1) for c in range(placement.num_devices)])
    return np.where(num_by_device.max(0) > 0, num_by_device.argmax(0), -1)


def local_share(
    trace: RoutingTrace, placement: ExpertPlacement, token_devices: Int[np.ndarray, "L T"]
) -> float:
    """Return the share of the assignments on the token's own device.

    Args:
        trace: Routing trace.
        placement: Placement of the experts.
        token_devices: Device of each token before each layer.
    """
    devices = experts_devices(trace, placement)
    is_real = devices < placement.num_devices
    return float((devices == token_devices[:, :, None])[is_real].mean())
