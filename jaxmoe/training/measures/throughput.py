# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""How much of the machine a run uses: model FLOPs utilisation, and memory at its peak.

    MFU = tokens per second * model FLOPs per token / (devices * peak FLOP/s of one device)

Model FLOPs are those of `jaxmoe/models/flops.py`: forward and backward of what a token meets
(top_k of the experts, not all), without recomputation under remat, padding or dropped rows. So a
run that recomputes has a lower MFU for the same hardware counters (PaLM, arXiv 2204.02311,
appendix B).

Peaks are dense (no structured sparsity), at boost clock, of one device as JAX counts them:

    TPU v4 275e12, v5e 197e12, v5p 459e12, v6e 918e12 in bfloat16: cloud.google.com/tpu/docs.
    float32 operands are multiplied in one bfloat16 pass at the default precision of `jax.lax.dot`,
    so that the bfloat16 peak is the limit of both.
    NVIDIA A100 312e12, H100 SXM and H200 SXM 989.5e12, H100 NVL
    and H200 NVL 835.5e12, H100 PCIe 756.5e12, B200 2250e12 in bfloat16, half of it in float32
    (TensorFloat-32, what XLA uses at the default precision): NVIDIA's data sheets, whose figures
    "with sparsity" are twice these.

    AMD MI250X (one of its two dies) 191.5e12 and MI300X 1307.4e12 in bfloat16, 47.9e12 and 163.4e12
    in float32, as matrices: AMD's data sheets. That JAX spells these names so is not verified.

A device that is not in the table, every CPU among them, has no peak and no MFU: None, never a
guess. To add a device: a row in `PEAKS`, before any row whose key its name also contains.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import jax

PEAKS: tuple[tuple[str, float, float], ...] = (
    ("tpu v4", 275e12, 275e12),
    ("tpu v5 lite", 197e12, 197e12),
    ("tpu v5e", 197e12, 197e12),
    ("tpu v5p", 459e12, 459e12),
    ("tpu v5", 459e12, 459e12),
    ("tpu v6 lite", 918e12, 918e12),
    ("tpu v6e", 918e12, 918e12),
    ("nvidia a100", 312e12, 156e12),
    ("nvidia h100 pcie", 756.5e12, 378.0e12),
    ("nvidia h100 nvl", 835.5e12, 417.5e12),
    ("nvidia h100", 989.5e12, 494.5e12),
    ("nvidia h200 nvl", 835.5e12, 417.5e12),
    ("nvidia h200", 989.5e12, 494.5e12),
    ("nvidia b200", 2250e12, 1125e12),
    ("amd instinct mi250x", 191.5e12, 47.9e12),
    ("amd instinct mi300x", 1307.4e12, 163.4e12),
)
"""Prefix of the device kind in lower case, peak FLOP/s in bfloat16, and in float32."""

_EXCEPT = ("tpu v4i", "tpu v4 lite")


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return the peak of one device in matrix products.

    Args:
        device_kind: Spelling of `jax.Device.device_kind`, such as "TPU v5 lite".
        dtype: Dtype of the operands: "bfloat16" or "float32".

    Returns:
        FLOP/s, or None for an unknown device.
    """
    kind = " ".join(device_kind.lower().split())
    if kind.startswith(_EXCEPT) or "mig" in kind.split():
        return None
    for beginning, bfloat16, float32 in PEAKS:
        if kind.startswith(beginning):
            return {"bfloat16": bfloat16, "float32": float32}.get(dtype)
    return None


def model_flops_utilization(
    tokens_per_second: float,
    flops_per_token: float,
    devices: Sequence[jax.Device],
    dtype: str,
) -> float | None:
    """Return the MFU as a fraction of 1, as defined in the module docstring.

    Args:
        tokens_per_second: Throughput of all devices together.
        flops_per_token: FLOPs of a training step, from `jaxmoe.models.flops`.
        devices: All devices of the mesh.
        dtype: Dtype of the operands of matrix products.

    Returns:
        The fraction, or None if the peak of a device is unknown.
    """
    peaks = [peak_flops(device.device_kind, dtype) for device in devices]
    peaks_known = [peak for peak in peaks if peak is not None]
    if not peaks_known or len(peaks_known) < len(peaks):
        return None
    return tokens_per_second * flops_per_token / sum(peaks_known)


def peak_memory(devices: Sequence[jax.Device]) -> tuple[int, str]:
    """Return the peak memory so far.

    Args:
        devices: Devices of this process.

    Returns:
        Bytes, and their source: "device" (the fullest one, from the allocator) or, without such
        statistics, "process" (resident set).
    """
    statistics = [device.memory_stats() or {} for device in devices]
    peaks = [stats["peak_bytes_in_use"] for stats in statistics if "peak_bytes_in_use" in stats]
    if peaks:
        return int(max(peaks)), "device"
    # Kilobytes, except on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
