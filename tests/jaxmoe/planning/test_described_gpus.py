# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of GPUs: what XLA reads, the shape of hosts, and the kernels that are chosen."""

from __future__ import annotations

import re

import pytest

from jaxmoe.planning.compilers.described_gpus import DESCRIBED, target_config, topology_shape
from jaxmoe.planning.hardware import CHIPS
from pallas_kernels.gpu import capability


@pytest.mark.parametrize("kind", DESCRIBED)
def test_a_description_agrees_with_the_tables_of_devices(kind):
    gpu, chip = DESCRIBED[kind], CHIPS[kind]
    assert gpu.memory == pytest.approx(chip.memory, rel=0.1)
    assert gpu.memory_bandwidth == pytest.approx(chip.memory_bandwidth, rel=0.01)
    names = [name for name in capability._CAPABILITIES if name in gpu.name]
    assert names and capability._CAPABILITIES[names[0]] == gpu.capability


def test_the_text_has_balanced_braces_and_the_name_of_the_device():
    text = target_config(DESCRIBED["h100"])
    assert text.count("{") == text.count("}") == 3
    assert 'device_description_str: "NVIDIA H100 80GB HBM3"' in text
    assert re.search(r"cuda_compute_capability \{ major: 9 minor: 0 \}", text)


@pytest.mark.parametrize(
    ("devices", "shape"), [(1, "1x1x1"), (4, "1x1x4"), (8, "1x1x8"), (64, "1x8x8")]
)
def test_hosts_of_eight(devices, shape):
    assert topology_shape(devices) == shape
