# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of quantized_matmul: both factors in float32, then their product."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.quantized_array import QuantizedArray, constant


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray, w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m n"]:
    """Return what `pallas_kernels.quantized_matmul` returns."""
    x, w = (constant(a).astype(jnp.float32) for a in (x, w))
    out = jnp.matmul(x, w, precision=jax.lax.Precision.HIGHEST)
    return out.astype(out_dtype)
