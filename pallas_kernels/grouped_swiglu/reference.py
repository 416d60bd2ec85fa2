# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of grouped_swiglu: its three products, each by the reference of grouped_matmul.

JAX derives the gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.reference import grouped_matmul
from pallas_kernels.grouped_swiglu.additions import NO_ADDITIONS, Additions, LowRankFactors
from pallas_kernels.quantized_array import QuantizedArray


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray,
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    row_factors: Float[Array, " R"] | None = None,
    *,
    additions: Additions = NO_ADDITIONS,
    down_is_turned: bool = False,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    del down_is_turned  # the compiler chooses the order
    gate_up, down = _sum(gate_up, additions.gate_up), _sum(down, additions.down)
    has_group = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
    rows = jnp.where(has_group[:, None], rows, jnp.zeros_like(rows))
    gate = grouped_matmul(rows, _one_of(gate_up, 0), group_sizes, rows.dtype)
    up = grouped_matmul(rows, _one_of(gate_up, 1), group_sizes, rows.dtype)
    hidden = jax.nn.silu(gate) * up
    if row_factors is not None:
        hidden = (hidden.astype(jnp.float32) * row_factors[:, None]).astype(rows.dtype)
    return grouped_matmul(hidden, down, group_sizes, rows.dtype)


def _sum(matrices: Any, factors: LowRankFactors | None) -> Any:
    """Return W + s A B, in the dtype of W."""
    if factors is None:
        return matrices
    product = jnp.einsum(
        "gkr,grn->gkn", factors.down, factors.up, preferred_element_type=jnp.float32
    )
    added = factors.scale * product.reshape(matrices.shape)
    return (matrices.astype(jnp.float32) + added).astype(matrices.dtype)


def _one_of(
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray, which: int
) -> Float[Array, "G k n"] | QuantizedArray:
    if not isinstance(gate_up, QuantizedArray):
        return gate_up[:, :, which]
    scales = gate_up.scales[:, :, which if gate_up.scales.shape[2] == 2 else 0]
    axis = None if gate_up.axis is None else -2
    return QuantizedArray(values=gate_up.values[:, :, which], scales=scales, axis=axis)
