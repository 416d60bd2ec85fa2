# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The door of quantized_matmul: checks, the choice of an implementation, and the table of them.

    out = x @ w        each factor as it is, or values * scales (`pallas_kernels.quantize`)

What is multiplied is what is given: an x in bfloat16 stays bfloat16 and meets weights of 8 or 4
bits turned into bfloat16 (W8A16, W4A16); an x quantised by the caller meets them in few bits (W8A8,
W4A8, FP8), and the sums are exact integers, or float32. Scales come in afterwards, per block.

The gradient goes to a floating x alone: d x = d out @ w^T. What is quantised is a constant.

To add an implementation: a file beside this one with the function (x, w, out_dtype), a line in
`OPERATION`, and a line in the table of the tests.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_factors import check_factors
from pallas_kernels.quantized_matmul import reference

OPERATION = Operation(
    name="quantized_matmul",
    implementations={"reference": reference.quantized_matmul},
)


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray,
    w: Float[Array, "k n"] | QuantizedArray,
    *,
    implementation: Implementation | None = None,
    out_dtype: Any = None,
) -> Float[Array, "m n"]:
    """Multiplies two matrices of which one or both are quantised.

    Args:
        x: Rows; quantised along its last axis (`axis=-1`) or by one scale.
        w: Columns; quantised along its first axis (`axis=-2`) or by one scale.
        implementation: Which implementation runs; None picks the fastest that runs here.
        out_dtype: Of the result; that of x when None, float32 where it is quantised.

    Returns:
        The product, summed in int32 or float32.

    Raises:
        ValueError: Shapes, axes or dtypes that do not fit, or an implementation that cannot run
            here or cannot take them.
    """
    _check(x, w)
    if out_dtype is None:
        out_dtype = jnp.float32 if isinstance(x, QuantizedArray) else x.dtype
    leaves = jax.tree.leaves((x, w))
    x, w = jax.tree.map(lambda leaf: match_varying(leaf, *leaves), (x, w))
    return OPERATION.function(implementation)(x, w, jnp.dtype(out_dtype))


def _check(x: Any, w: Any) -> None:
    if (x.ndim, w.ndim) != (2, 2) or x.shape[1] != w.shape[0]:
        raise ValueError(f"quantized_matmul takes x [m k] and w [k n], not {x.shape}, {w.shape}.")
    check_factors("quantized_matmul", {"x": x, "w": w}, (-1, -2))
