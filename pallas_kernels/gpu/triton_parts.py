# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Parts of the Triton kernels of attention: products in float32, and logits to base 2."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array

LOG2_E = math.log2(math.e)


def dot(a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """Return the product of two matrices over the given dimensions, summed in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def capped_logits(products: Array, rules: Any) -> Array:
    """Return scaled and capped logits, in units of log 2."""
    if rules.softcap is None:
        return products * (rules.scale * LOG2_E)
    return (rules.softcap * LOG2_E) * jnp.tanh(products * (rules.scale / rules.softcap))
