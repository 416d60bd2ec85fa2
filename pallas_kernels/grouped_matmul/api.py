# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The door of grouped_matmul: checks, the choice of an implementation, and the table of them.

    out[r] = rows[r] @ weights[g]     for ends[g-1] <= r < ends[g], ends = cumsum(group_sizes)
    out[r] = 0                        for ends[G-1] <= r

It is jax.lax.ragged_dot with two promises more: rows past the end may hold anything, NaN included,
and no backend multiplies many rows by every group's matrix (XLA does, on CPU and GPU, forward or
backward: G times the work). The gradients of rows and weights come with each implementation;
forward-mode differentiation comes with `reference` only.

It knows no mesh. Inside `jax.shard_map`, over sharded rows and replicated weights, the gradient of
the weights comes back summed over the devices.

To add an implementation: a file beside this one with the same function (without
`implementation`), a line in `OPERATION`, and a line in the table of the tests.
"""

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.grouped_matmul import reference, xla
from pallas_kernels.jax_versions import match_varying

OPERATION = Operation(
    name="grouped_matmul",
    implementations={"reference": reference.grouped_matmul, "xla": xla.grouped_matmul},
)


def grouped_matmul(
    rows: Float[Array, "R k"],
    weights: Float[Array, "G k n"],
    group_sizes: Int[Array, " G"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "R n"]:
    """Multiplies each group of consecutive rows by the group's own matrix.

    Args:
        rows: Sorted by group: first the rows of group 0, then those of group 1, and so on. What
            stands past the last group is never read.
        weights: One matrix per group, of the dtype of `rows`.
        group_sizes: How many rows each group has, 0 allowed, their sum at most R.
        implementation: Which implementation runs; None picks the fastest that runs here.

    Returns:
        The products, accumulated in float32, in the dtype of `rows`; exactly 0 past the last
        group. Rows past the last group contribute nothing to the gradients either.

    Raises:
        ValueError: Shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    _check(rows, weights, group_sizes)
    group_sizes = group_sizes.astype(jnp.int32)  # the sum of narrower ones would wrap
    if rows.size == 0 or weights.size == 0:
        empty = jnp.zeros((rows.shape[0], weights.shape[2]), rows.dtype)
        return match_varying(empty, rows, weights, group_sizes)
    return OPERATION.function(implementation)(
        match_varying(rows, weights, group_sizes),
        match_varying(weights, rows, group_sizes),
        match_varying(group_sizes, rows, weights),
    )


def _check(rows: Array, weights: Array, group_sizes: Array) -> None:
    shapes = f"rows {rows.shape}, weights {weights.shape}, group_sizes {group_sizes.shape}"
    if (rows.ndim, weights.ndim, group_sizes.ndim) != (2, 3, 1):
        raise ValueError(
            f"grouped_matmul takes rows [R k], weights [G k n] and group_sizes [G], not {shapes}."
        )
    if rows.shape[1] != weights.shape[1]:
        raise ValueError(
            f"grouped_matmul: the width of rows ({rows.shape[1]}) must equal the contracted "
            f"dimension of weights ({weights.shape[1]}), in {shapes}. "
            "Weights are [G k n]: transpose them if they are stored [G n k]."
        )
    if weights.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"grouped_matmul: weights have {weights.shape[0]} groups and group_sizes "
            f"{group_sizes.shape[0]}, in {shapes}: give one size for each matrix, 0 included."
        )
    if rows.dtype != weights.dtype or not jnp.issubdtype(rows.dtype, jnp.floating):
        raise ValueError(
            f"grouped_matmul: rows ({rows.dtype}) and weights ({weights.dtype}) must have the "
            "same floating dtype: cast one of them with .astype."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"grouped_matmul: group_sizes must be integers, not {group_sizes.dtype}.")
