# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multiplies each group of consecutive rows by the group's own matrix.

    out[r] = rows[r] @ weights[g]     for ends[g-1] <= r < ends[g], ends = cumsum(group_sizes)
    out[r] = 0                        for ends[G-1] <= r

It is jax.lax.ragged_dot with two more guarantees: rows past the end may hold anything, NaN
included, and no backend multiplies many rows by every group's matrix (XLA does, on CPU and GPU,
forward or backward: G times the work). Each implementation has the gradients of rows and weights;
forward-mode differentiation works with `reference` only.

Weights may be quantised (`pallas_kernels.quantize`, axis=-2), and then rows too (axis=-1). The
factors are multiplied as given, as in `quantized_matmul`; only floating operands have gradients. A
`MixedArray` determines how floating rows are rounded; they then have no gradient.

`grouped_outer` is the other product that an expert needs, the gradient of its matrix:

    out[g] = sum over the rows r of g of rows[r]^T other_rows[r]

Where sizes add up to more than R, groups are cut at R, and groups that begin there are empty.

It knows no mesh. Inside `jax.shard_map`, over sharded rows and replicated weights, the gradient of
the weights comes back summed over the devices.

To add an implementation: `pallas_kernels/grouped_matmul/<name>.py` with the two products of
`pallas_kernels/grouped_matmul/products.py`, its line in `PRODUCTS` of
`pallas_kernels/grouped_matmul/api.py`, a row in
`tests/pallas_kernels/grouped_matmul/test_grouped_matmul.py`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.grouped_matmul import products, reference, xla
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_factors import check_factors, largest_sum
from pallas_kernels.quantized_matmul.mixed_array import MixedArray, round_group_activations

_PACKAGE = "pallas_kernels.grouped_matmul"


def _defer(module: str) -> products.Products:
    start = f"{_PACKAGE}.{module}:PRODUCTS"
    return products.Products(
        DeferredProduct(f"{start}.multiply"), DeferredProduct(f"{start}.contract")
    )


PRODUCTS: dict[Implementation, products.Products] = {
    "xla": xla.PRODUCTS,
    "pallas_tpu": _defer("tpu.kernels"),
    "pallas_gpu": _defer("gpu.kernels"),
}
"""The two products of every implementation except the reference."""

_REFUSALS: dict[Implementation, Callable[..., str | None]] = {
    "pallas_gpu": DeferredProduct(f"{_PACKAGE}.gpu.kernels:reason_against_default")
}

OPERATION = Operation(
    name="grouped_matmul",
    implementations={
        # JAX derives the gradients of the reference.
        "reference": reference.grouped_matmul,
        **{
            name: functools.partial(products.grouped_matmul, products=one)
            for name, one in PRODUCTS.items()
        },
    },
    refusals=_REFUSALS,
)

OUTER = Operation(
    name="grouped_outer",
    implementations={
        "reference": reference.grouped_outer,
        **{name: one.contract for name, one in PRODUCTS.items()},
    },
    refusals=_REFUSALS,
)


def grouped_matmul(
    rows: Float[Array, "R k"] | QuantizedArray,
    weights: Float[Array, "G k n"] | QuantizedArray | MixedArray,
    group_sizes: Int[Array, " G"],
    *,
    implementation: Implementation | None = None,
    out_dtype: Any = None,
) -> Float[Array, "R n"]:
    """Return each group of consecutive rows times the group's own matrix.

    Args:
        rows: Rows sorted by group: first the rows of group 0, then those of group 1, and so on.
            Rows
            past the last group are not read. Quantised rows have scales along -1, or one scale.
        weights: One matrix per group, in the dtype of `rows`; or quantised, with scales along -2 or
            one scale; or a stack of `quantize_mixed`, with floating rows.
        group_sizes: Number of rows of each group, 0 allowed; groups are cut at R.
        implementation: Implementation to run; None picks the fastest that runs here.
        out_dtype: Dtype of the result; None takes that of `rows`, float32 where they are quantised.

    Returns:
        The products, accumulated in float32 (int32 for integers); exactly 0 past the last group.
        Rows past the last group do not contribute to the gradients either.

    Raises:
        ValueError: Shapes or dtypes do not fit, or the implementation cannot run here.
    """
    _check(rows, weights, group_sizes)
    if out_dtype is None:
        out_dtype = jnp.float32 if isinstance(rows, QuantizedArray) else rows.dtype
    group_sizes = sizes_within(rows.shape[0], group_sizes)
    if isinstance(weights, MixedArray):
        assert not isinstance(rows, QuantizedArray)  # checked above
        rows = round_group_activations(rows, weights, group_sizes)
        weights = weights.weights
    operands = (rows, weights, group_sizes)
    rows, weights, group_sizes = match_varying(operands, operands)
    if 0 in (*rows.shape, *weights.shape):
        empty = jnp.zeros((rows.shape[0], weights.shape[2]), out_dtype)
        return match_varying(empty, rows, weights, group_sizes)
    multiply = OPERATION.function(implementation, rows, weights)
    return multiply(rows, weights, group_sizes, jnp.dtype(out_dtype))


def grouped_outer(
    rows: Float[Array, "R k"] | QuantizedArray,
    other_rows: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    implementation: Implementation | None = None,
    out_dtype: Any = None,
) -> Float[Array, "G k n"]:
    """Return the sum of rows^T other_rows over the rows of each group, without a gradient.

    Args:
        rows: Rows sorted by group, as in `grouped_matmul`; quantised rows have one scale.
        other_rows: As many rows, sorted alike; quantised rows have one scale.
        group_sizes: Number of rows of each group, 0 allowed; groups are cut at R.
        implementation: Implementation to run; None picks the fastest that runs here.
        out_dtype: Dtype of the result; None takes float32.

    Returns:
        The sums, 0 for an empty group, accumulated in float32 (int32 for integers, 133144 rows of
        int8 at a time).

    Raises:
        ValueError: Shapes or dtypes do not fit, or the implementation cannot run here.
    """
    _check_outer(rows, other_rows, group_sizes)
    group_sizes = sizes_within(rows.shape[0], group_sizes)
    operands = (rows, other_rows, group_sizes)
    rows, other_rows, group_sizes = match_varying(operands, operands)
    out_dtype = jnp.dtype(jnp.float32 if out_dtype is None else out_dtype)
    if 0 in (*rows.shape, *other_rows.shape, *group_sizes.shape):
        shape = (group_sizes.shape[0], rows.shape[1], other_rows.shape[1])
        empty = jnp.zeros(shape, out_dtype)
        return match_varying(empty, rows, other_rows, group_sizes)
    contract = OUTER.function(implementation, rows, other_rows)
    length = largest_sum(rows, other_rows)
    if length is None or rows.shape[0] <= length:
        return contract(rows, other_rows, group_sizes, out_dtype=out_dtype)
    # int32 may overflow over so many rows: parts are added in float32.
    out = jnp.float32(0.0)
    ends = jnp.cumsum(group_sizes)
    for start in range(0, rows.shape[0], length):
        stop = min(start + length, rows.shape[0])
        sizes = jnp.diff(jnp.clip(ends, start, stop), prepend=start)
        part = (_rows_of(x, start, stop) for x in (rows, other_rows))
        out = out + contract(*part, sizes, out_dtype=jnp.float32)
    return out.astype(out_dtype)


def sizes_within(num_rows: int, group_sizes: Int[Array, " G"]) -> Int[Array, " G"]:
    """Return the group sizes cut at a number of rows, in int32 (narrower sums would wrap).

    Args:
        num_rows: Number of rows R.
        group_sizes: Sizes as given.
    """
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), num_rows)
    return jnp.diff(ends, prepend=0)


def _rows_of(x: Any, start: int, stop: int) -> QuantizedArray:
    return dataclasses.replace(x, values=x.values[start:stop])


def _check(rows: Any, weights: Any, group_sizes: Array) -> None:
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
    if isinstance(weights, MixedArray):
        if isinstance(rows, QuantizedArray) or not jnp.issubdtype(rows.dtype, jnp.floating):
            raise ValueError(
                "grouped_matmul: a MixedArray rounds the rows itself, which must be floating, not "
                f"{'quantised' if isinstance(rows, QuantizedArray) else rows.dtype}."
            )
        weights = weights.weights
    check_factors("grouped_matmul", {"rows": rows, "weights": weights}, (-1, -2))
    _check_integers("grouped_matmul", group_sizes)


def _check_outer(rows: Any, other_rows: Any, group_sizes: Array) -> None:
    shapes = f"rows {rows.shape}, other_rows {other_rows.shape}, group_sizes {group_sizes.shape}"
    if (rows.ndim, other_rows.ndim, group_sizes.ndim) != (2, 2, 1) or rows.shape[
        0
    ] != other_rows.shape[0]:
        raise ValueError(
            f"grouped_outer takes rows [R k], other_rows [R n] and group_sizes [G], not {shapes}."
        )
    check_factors("grouped_outer", {"rows": rows, "other_rows": other_rows}, (None, None))
    _check_integers("grouped_outer", group_sizes)


def _check_integers(operation: str, group_sizes: Array) -> None:
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"{operation}: group_sizes must be integers, not {group_sizes.dtype}.")
