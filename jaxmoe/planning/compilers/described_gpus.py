# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Describes GPUs to XLA, which compiles for them without one.

The numbers are those that a GPU reports of itself; XLA chooses tiles by them. The function
`get_topology_desc` of `jax.experimental.topologies` takes the text of `target_config`, and a shape
of partitions, hosts and devices of each host.

To add a GPU: a row of DESCRIBED in `jaxmoe/planning/compilers/described_gpus.py`, and its compute
capability in `pallas_kernels/gpu/capability.py`.
"""

from __future__ import annotations

import dataclasses

HOST_SIZE = 8
"""GPUs of a host."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DescribedGpu:
    """What a GPU reports of itself."""

    name: str
    """Device kind to JAX."""
    capability: tuple[int, int]
    """Compute capability."""
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    """Most bytes that a block may ask for."""
    l2_cache: int
    clock_ghz: float
    memory: int
    memory_bandwidth: int


_H100 = DescribedGpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    shared_memory_per_core=233472,
    shared_memory_per_block=232448,
    l2_cache=52428800,
    clock_ghz=1.98,
    memory=84942979072,
    memory_bandwidth=3352320000000,
)

DESCRIBED: dict[str, DescribedGpu] = {
    "h100": _H100,
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200", memory=151397597184, memory_bandwidth=4800000000000
    ),
    "a100": DescribedGpu(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        shared_memory_per_core=167936,
        shared_memory_per_block=166912,
        l2_cache=41943040,
        clock_ghz=1.41,
        memory=85100068864,
        memory_bandwidth=2039040000000,
    ),
}
"""GPUs by the name in a topology."""


def target_config(gpu: DescribedGpu) -> str:
    """Return the description of a GPU that XLA reads.

    Args:
        gpu: Row of DESCRIBED.
    """
    major, minor = gpu.capability
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared_memory_per_core,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus_per_core,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.memory_bandwidth,
        "l2_cache_size": gpu.l2_cache,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.shared_memory_per_block,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    lines = [f"  {name}: {value}" for name, value in device.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
        (
            "gpu_device_info {",
            *lines,
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 10 }",
            f'device_description_str: "{gpu.name}"',
        )
    )


def topology_shape(num_devices: int) -> str:
    """Return partitions, hosts and devices of each host, as `get_topology_desc` takes them.

    Args:
        num_devices: GPUs of one host, or a multiple of `HOST_SIZE`.
    """
    local = min(num_devices, HOST_SIZE)
    return f"1x{num_devices // local}x{local}"
