# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of grouped_matmul: every row times every group's matrix, then the right one chosen.

G times the work of the result, and [G R n] of memory: for tests and for small shapes. The gradients
are those that jax derives from these lines.
"""

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int


def grouped_matmul(
    rows: Float[Array, "R k"], weights: Float[Array, "G k n"], group_sizes: Int[Array, " G"]
) -> Float[Array, "R n"]:
    """See `pallas_kernels.grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)
    group_ids = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")  # G past the end
    # Chosen before the product too: in the gradient of the weights 0 * NaN would be NaN.
    rows = jnp.where((group_ids < weights.shape[0])[:, None], rows, jnp.zeros_like(rows))
    products = jnp.einsum("rk,gkn->grn", rows, weights, preferred_element_type=jnp.float32)
    is_own = group_ids[None] == jnp.arange(weights.shape[0])[:, None]  # [G R]
    out = jnp.sum(jnp.where(is_own[:, :, None], products, jnp.zeros_like(products)), axis=0)
    return out.astype(rows.dtype)
