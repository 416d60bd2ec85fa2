# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lays the instances of a served model out on groups of devices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from jaxmoe.contrib.fleet.executor import MeshExecutor
from jaxmoe.contrib.fleet.layouts import replicated_on, weights_on
from jaxmoe.execution import ExecutionConfig, ServedConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.serve.device.config import ExecutorConfig
from sharding.mesh import MeshConfig, make_mesh

Devices = Sequence[Any]
"""Devices of one instance."""


def device_groups(number: int, mesh: MeshConfig | None, devices: Devices = ()) -> list[Devices]:
    """Return the devices of each instance: others for each, or the same where they are too few.

    Args:
        number: Instances.
        mesh: Mesh of each; one device when None.
        devices: Devices to divide; those of this process when empty.

    Raises:
        ValueError: There are enough for several instances and not for all, or a size is open.
    """
    available = list(devices) or jax.devices()
    if number == 1:
        return [available]
    sizes = () if mesh is None else mesh.sizes
    if -1 in sizes:
        raise ValueError(
            f"engine.instances={number} need the sizes of run.mesh, of which one is -1: give the"
            " number of devices of one instance"
        )
    size = math.prod(sizes)
    if len(available) < 2 * size:
        return [available[:size]] * number
    if len(available) < number * size:
        raise ValueError(
            f"engine.instances={number} x {size} devices (run.mesh) need {number * size} devices,"
            f" there are {len(available)}: set engine.instances to at most {len(available) // size}"
        )
    return [available[size * index : size * (index + 1)] for index in range(number)]


def reachable(groups: Sequence[Devices], devices: Devices = ()) -> list[Devices]:
    """Return the devices that each instance may grow to: its own first, then its part of the rest.

    Args:
        groups: Devices of each instance.
        devices: All devices; those of this process when empty.
    """
    available = list(devices) or jax.devices()
    if len(set(map(tuple, groups))) == 1:  # one instance, or all on the same devices
        return [[*groups[0], *(device for device in available if device not in groups[0])]] * len(
            groups
        )
    in_groups = {device for group in groups for device in group}
    free = [device for device in available if device not in in_groups]
    part = len(free) // len(groups)
    return [[*device, *free[part * n : part * (n + 1)]] for n, device in enumerate(groups)]


def executors_on(
    groups: Sequence[Devices],
    model: ModelConfig,
    params: Any,
    router_state: Any,
    *,
    config: ExecutorConfig,
    execution: ExecutionConfig,
    mesh: MeshConfig | None,
) -> list[MeshExecutor]:
    """Return an executor of the same weights on each group of devices.

    Args:
        groups: Devices of each instance.
        model: Model of the weights.
        params: Weights, on any devices.
        router_state: State of the routers.
        config: Sizes of each executor.
        execution: How the model is computed.
        mesh: Mesh of each instance; one device when None.

    Raises:
        ValueError: Quantised weights are to be laid out on meshes.
    """
    params, routers = jax.device_get((params, router_state))
    if mesh is None or math.prod(mesh.sizes) == 1:
        options: dict[str, Any] = {"config": config, "execution": execution}
        executors = list[MeshExecutor]()
        first = dict[Any, MeshExecutor]()
        for device, *_ in groups:  # those on one device have its arrays together
            group_mesh = first[device].params if device in first else params
            with jax.default_device(device):
                executors.append(MeshExecutor(model, group_mesh, routers, **options))
            first.setdefault(device, executors[-1])
        return executors
    execution = dataclasses.replace(execution, mesh=mesh)
    executors = []
    for devices in groups:
        group_mesh = make_mesh(mesh, devices)
        options = {"config": config, "execution": execution, "mesh": group_mesh}
        laid_out = weights_on(model, params, ServedConfig.of(execution), group_mesh)
        executors.append(
            MeshExecutor(model, laid_out, replicated_on(routers, group_mesh), **options)
        )
    return executors
