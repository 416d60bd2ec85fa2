# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The limits of the machine: dense products of 8192^3 in three dtypes, and a copy of 512 MB."""

from __future__ import annotations

import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.accelerator.candidates import candidate
from experiments.bench.accelerator.work import BenchWork, emit, run_part

DTYPES = ("bfloat16", "float8_e4m3fn", "int8")


def machine(work: BenchWork) -> None:
    """Emit what the device is, and its limits."""
    started = time.perf_counter()
    device = jax.devices()[0]
    emit(
        case="machine",
        name=device.device_kind,
        platform=device.platform,
        jax=jax.__version__,
        runtime=device.client.platform_version.splitlines()[0],
        processors=os.cpu_count(),
        start_seconds=round(time.perf_counter() - started, 2),
    )
    size = 256 if work.is_tiny else 8192
    for name in DTYPES:
        dtype = jnp.dtype(name)
        is_integer = jnp.issubdtype(dtype, jnp.integer)

        def draw(
            key: jax.Array, dtype: Any = dtype, scale: float = 40.0 if is_integer else 1.0
        ) -> Any:
            keys = jax.random.split(key)
            return tuple((scale * jax.random.normal(k, (size, size))).astype(dtype) for k in keys)

        def product(x: Any, y: Any, sums: Any = jnp.int32 if is_integer else jnp.bfloat16) -> Any:
            return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=sums)

        candidate(work, f"dense {size}^3", f"JAX {name}", product, draw, flops=2.0 * size**3)
    count = (1 if work.is_tiny else 256) * 2**20
    candidate(
        work,
        "copy",
        "JAX x + 1",
        lambda x: x + 1,
        lambda key: (jax.random.normal(key, (count,), jnp.bfloat16),),
        moved=4.0 * count,
    )


if __name__ == "__main__":
    run_part(machine)
