# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fits the mesh of a run to the processes that are left (`launch --supervise --elastic shrink`).

The supervisor sets $JAXMOE_ELASTIC, and starts fewer processes when one is lost for good. A run
then takes the largest size of `data` that fits their devices, its batch and its other axes. The
state is restored on that mesh, from the snapshots in memory where there are any.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os

import jax

from jaxmoe.contrib.elastic.request import DevicePlace, check_resized, fit_data
from jaxmoe.messages import say
from jaxmoe.resilience.shared_memory import ELASTIC
from jaxmoe.run.assemble import Setting
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.parts import ConfiguredPart


class Shrink(ConfiguredPart):
    """Fits the mesh of a run to the processes that are left."""

    def fit(self, setting: Setting) -> Setting:
        """Return the configuration for the devices that are there, and those that are used."""
        config, devices = fit_devices(setting.config)
        return dataclasses.replace(setting, config=config, devices=devices)


def fit_devices(config: PretrainConfig) -> tuple[PretrainConfig, list[jax.Device]]:
    """Return the configuration for the devices that are there, and those that the run uses.

    Args:
        config: Configuration of this start.

    Raises:
        ValueError: No size of mesh.data fits.
    """
    devices = jax.devices()
    mesh = config.execution.mesh
    if not os.environ.get(ELASTIC):
        return config, devices
    num_other = math.prod(size for axis, size in mesh.by_axis.items() if axis != "data")
    if num_other < 1 or mesh.data != -1 and num_other * mesh.data <= len(devices):
        return config, devices
    mesh = dataclasses.replace(mesh, data=max(1, len(devices) // num_other))
    places = [DevicePlace(id=device.id, process=device.process_index) for device in devices]
    target, ids = fit_data(mesh, places, functools.partial(check_resized, config))
    say(
        f"elastic  mesh.data={target.data}, the largest size that fits the {len(devices)}"
        f" devices of"
        f" {jax.process_count()} processes"
    )
    execution = dataclasses.replace(config.execution, mesh=target)
    chosen = [device for device in devices if device.id in ids]
    return dataclasses.replace(config, execution=execution), chosen
