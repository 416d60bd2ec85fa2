# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Peaks of devices, MFU by hand, and memory at its peak."""

import inspect

import jax
import pytest

from jaxmoe.training.measures.throughput import (
    PEAKS,
    model_flops_utilization,
    peak_flops,
    peak_memory,
)


@pytest.mark.parametrize(
    ("kind", "bfloat16", "float32"),
    [
        ("TPU v4", 275e12, 275e12),
        ("TPU v5 lite", 197e12, 197e12),
        ("TPU v5e", 197e12, 197e12),
        ("TPU v5", 459e12, 459e12),
        ("TPU v5p", 459e12, 459e12),
        ("TPU v6 lite", 918e12, 918e12),
        ("TPU v6e", 918e12, 918e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 494.5e12),
        ("NVIDIA H100 PCIe", 756.5e12, 378e12),
        ("NVIDIA H100 NVL", 835.5e12, 417.5e12),
        ("NVIDIA H200", 989.5e12, 494.5e12),
        ("NVIDIA B200", 2250e12, 1125e12),
    ],
)
def test_peaks_of_known_devices(kind, bfloat16, float32):
    assert peak_flops(kind, "bfloat16") == bfloat16
    assert peak_flops(kind, "float32") == float32


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("cpu", "float32"),
        ("TPU v4i", "bfloat16"),
        ("TPU v3", "bfloat16"),
        ("NVIDIA RTX A1000", "bfloat16"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16"),
        ("NVIDIA H200", "float16"),
    ],
)
def test_what_is_not_known_has_no_peak(kind, dtype):
    assert peak_flops(kind, dtype) is None


def test_every_row_of_the_table_can_be_reached():
    for beginning, bfloat16, _ in PEAKS:
        assert peak_flops(beginning, "bfloat16") == bfloat16


class Fake:
    def __init__(self, kind, stats=None):
        self.device_kind, self._stats = kind, stats

    def memory_stats(self):
        return self._stats


def test_mfu_is_the_share_of_the_peaks_of_all_devices():
    # Without the check of annotations: these devices are made up.
    mfu = inspect.unwrap(model_flops_utilization)
    two = [Fake("TPU v4"), Fake("TPU v4")]
    assert mfu(1e5, 1.1e9, two, "bfloat16") == pytest.approx(1.1e14 / 550e12)
    assert mfu(1e5, 1e9, [Fake("TPU v4"), Fake("TPU v3")], "bfloat16") is None
    assert model_flops_utilization(1e5, 1e9, jax.devices(), "float32") is None


def test_memory_of_the_fullest_device_or_of_the_process():
    memory = inspect.unwrap(peak_memory)
    full = [Fake("a", {"peak_bytes_in_use": 7}), Fake("a", {"peak_bytes_in_use": 9})]
    assert memory(full) == (9, "device")
    found, measured_on = peak_memory(jax.local_devices())
    assert measured_on == "process"
    assert 10**8 < found < 10**12  # jax alone is larger than the one, no machine than the other
