# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products of few bits beside a dense product in bfloat16: many rows, and those of decoding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench.accelerator.candidates import candidate
from experiments.bench.accelerator.work import BenchWork, run_part
from pallas_kernels import OPERATIONS, quantize, quantized_matmul

SIZES = ((2048, 4096, 4096), (16, 4096, 14336))
TINY = ((32, 256, 256),)
FORMS: dict[str, tuple[str | None, str, int | None]] = {
    "int8 x int8": ("int8", "int8", None),
    "fp8 x fp8": ("float8_e4m3fn", "float8_e4m3fn", None),
    "int4 weights": (None, "int4", 128),
}
"""Format of the rows, format of the weights, and the block of the weights' scales."""


def few_bits(work: BenchWork) -> None:
    """Emit the rows of each form and implementation."""
    for m, k, n in TINY if work.is_tiny else SIZES:
        size = f"{m} x {k} x {n}"
        flops = 2.0 * m * k * n
        dense = functools.partial(_draw, (m, k, n), (None, None, None))
        candidate(work, f"dense {size}", "JAX bfloat16", lambda x, w: x @ w, dense, flops=flops)
        for label, form in FORMS.items():
            draw = functools.partial(_draw, (m, k, n), form)
            for name in OPERATIONS["quantized_matmul"].runnable():
                if name != "reference":
                    run = functools.partial(_product, name)
                    candidate(work, f"{label} {size}", name, run, draw, flops=flops)


def _product(implementation: Any, x: Any, w: Any) -> Any:
    return quantized_matmul(x, w, implementation=implementation, out_dtype=jnp.bfloat16)


def _draw(sizes: tuple[int, int, int], form: tuple[Any, ...], key: jax.Array) -> tuple[Any, Any]:
    m, k, n = sizes
    rows, weights, block = form
    keys = jax.random.split(key)
    x: Any = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w: Any = jax.random.normal(keys[1], (k, n), jnp.bfloat16)
    if rows is not None:
        x = quantize(x, rows, axis=-1)
    if weights is not None:
        w = quantize(w, weights, axis=-2, block_size=block)
    return x, w


if __name__ == "__main__":
    run_part(few_bits)
