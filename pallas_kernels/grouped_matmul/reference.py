# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of grouped_matmul: every row times every group's matrix, then a selection.

G times the work of the result, and [G R n] of memory: for tests and small shapes. JAX derives the
gradients.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Bool, Float, Int
from pallas_kernels.quantized_array import QuantizedArray, constant


def grouped_matmul(
    rows: Float[Array, "R k"] | QuantizedArray,
    weights: Float[Array, "G k n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    out_dtype: Any,
) -> Float[Array, "R n"]:
    """Return what `pallas_kernels.grouped_matmul` returns."""
    wide = constant(rows)
    matrices = constant(weights)
    if isinstance(weights, QuantizedArray):
        wide = wide.astype(jnp.float32)
    is_own = _is_own(rows.shape[0], group_sizes)
    # Selected before the product too: 0 * NaN in the gradient of the weights would be NaN.
    wide = jnp.where(jnp.any(is_own, axis=0)[:, None], wide, jnp.zeros_like(wide))
    products = jnp.einsum("rk,gkn->grn", wide, matrices, preferred_element_type=jnp.float32)
    out = jnp.sum(jnp.where(is_own[:, :, None], products, jnp.zeros_like(products)), axis=0)
    return out.astype(out_dtype)


def grouped_outer(
    rows: Float[Array, "R k"] | QuantizedArray,
    other_rows: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Float[Array, "G k n"]:
    """Return what `pallas_kernels.grouped_outer` returns."""
    rows = constant(rows)
    other_rows = constant(other_rows)
    is_own = _is_own(rows.shape[0], group_sizes)[:, :, None]
    rows, other_rows = (
        jnp.where(is_own, x[None], jnp.zeros_like(x)[None]) for x in (rows, other_rows)
    )
    out = jnp.einsum("grk,grn->gkn", rows, other_rows, preferred_element_type=jnp.float32)
    return out.astype(out_dtype)


def _is_own(num_rows: int, group_sizes: Int[Array, " G"]) -> Bool[Array, "G R"]:
    group_ids = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(num_rows), side="right")
    return group_ids[None] == jnp.arange(group_sizes.shape[0])[:, None]
