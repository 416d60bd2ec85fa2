# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Tests that "auto" computes in bfloat16 where this CPU and this JAX multiply it fast."""

import jax
import jax.numpy as jnp
import pytest

from jaxmoe import precision
from jaxmoe.precision import PrecisionPolicy

FAST = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nprocessor\t: 1\nflags\t: fpu\n"


@pytest.fixture(autouse=True)
def _asked_anew():
    precision.multiplies_bfloat16_fast.cache_clear()
    yield
    precision.multiplies_bfloat16_fast.cache_clear()


@pytest.mark.parametrize(
    ("cpuinfo", "version", "devices", "dtype"),
    [
        (FAST, (0, 12, 0), 1, jnp.bfloat16),
        (FAST.replace("avx512_bf16", "amx_bf16"), (0, 13, 1), 1, jnp.bfloat16),
        (FAST.replace("avx512_bf16", "avx512_vnni"), (0, 12, 0), 1, jnp.float32),
        (FAST, (0, 11, 2), 1, jnp.float32),
        (FAST, (0, 12, 0), 8, jnp.float32),
        (None, (0, 12, 0), 1, jnp.float32),
        ("Features : asimd bf16\n", (0, 12, 0), 1, jnp.float32),
    ],
    ids=["avx512", "amx", "no_instructions", "old_jax", "devices", "no_cpuinfo", "arm"],
)
def test_auto_is_bfloat16_where_it_is_fast(cpuinfo, version, devices, dtype, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(cpuinfo)
    monkeypatch.setattr(precision, "_CPUINFO", file)
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "local_device_count", lambda backend: devices)
    assert PrecisionPolicy().compute_dtype == dtype
    assert PrecisionPolicy(compute="float32").compute_dtype == jnp.float32
