# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the compiler of a topology that is not attached, and the devices that it describes.

    TPUs    libtpu, extra [plan]
    GPUs    the CUDA plugin, extra [cuda], for those of `described_gpus.py`
    CPUs    fake devices of this process

To add a platform: `check_compiler` and `topology_devices` in
`jaxmoe/planning/compilers/topologies.py`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxmoe.optional import MissingPackageError
from jaxmoe.planning.compilers.described_gpus import DESCRIBED, target_config, topology_shape
from jaxmoe.planning.hardware import Topology


def check_compiler(topology: Topology) -> None:
    """Refuse a topology without an installed compiler.

    Raises:
        MissingPackageError: libtpu, or the plugin of CUDA, is not installed.
        ValueError: The topology is of GPUs that nothing describes to the compiler.
    """
    platform = topology.chip.platform
    kind = topology.kind
    if platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise MissingPackageError(
            f"topology={topology.text}: libtpu, which compiles for a TPU that is not attached, is"
            " not installed: pip install 'jaxmoe[plan]'; --compiles 0 plans in closed form"
        )
    if platform == "gpu" and kind not in DESCRIBED:
        raise ValueError(
            f"topology={topology.text}: compiling for a GPU that is not attached needs a"
            f" description of it, and there is none of a {kind} (there are"
            f" {', '.join(DESCRIBED)}): --compiles 0 plans in closed form"
        )
    if platform == "gpu" and not has_cuda_plugin():
        raise MissingPackageError(
            f"topology={topology.text}: the CUDA plugin, which compiles for a GPU that is not"
            " attached, is not installed: pip install 'jaxmoe[cuda]'; --compiles 0 plans in closed"
            " form"
        )


def has_cuda_plugin() -> bool:
    """Return whether a plugin of CUDA is installed beside JAX."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") is not None
        for version in (12, 13)
    )


def topology_devices(topology: Topology) -> Sequence[Any]:
    """Return the devices of a topology from its compiler.

    Raises:
        ValueError: The compiler does not know this shape, or counts its devices differently.
    """
    if topology.chip.platform == "cpu":
        return jax.devices("cpu")[: topology.num_devices]
    if topology.chip.platform == "gpu":
        return _described_gpus(topology)
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=topology.compiler_name, **topology.compiler_options
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"topology={topology.text}: the compiler has no such slice ({first}): choose the shape"
            " of one that can be rented, such as tpu:v5e:16x16 or tpu:v5p:4x4x4"
        ) from error
    if len(described.devices) != topology.num_devices:
        raise ValueError(
            f"topology={topology.text}: the compiler describes {len(described.devices)} devices"
            f" where a pod has {topology.num_devices}:"
            " --compiles 0 plans in closed form"
        )
    return described.devices


def _described_gpus(topology: Topology) -> Sequence[Any]:
    """Return the GPUs of a topology, hosts of eight, as the CUDA plugin describes them."""
    try:
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name=topology.kind,
            topology=topology_shape(topology.num_devices),
            target_config=target_config(DESCRIBED[topology.kind]),
        )
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(
            f"topology={topology.text}: the CUDA plugin cannot describe it ({first}): install it"
            " with the version of this jax, pip install 'jaxmoe[cuda]'; --compiles 0 plans in"
            " closed form"
        ) from error
    return described.devices
