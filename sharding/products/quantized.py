# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products of activations and a quantised matrix, for inference.

    y = x @ (values * scales)                      x not rounded           W8A16, W4A16
    y = (x / s -> int8) @ values * scales * s      a scale for each row    W8A8, W4A8, W4A4, FP8
    y = (x[order] / s -> int8, int4) @ ...         a scale for each block  W4AX (a MixedArray)

The matrix has any number of dimensions, those that are summed over first. Its scales are in blocks
along the last of these, so that the matrix flattened to [k n] has equal blocks along k. The product
is `pallas_kernels.quantized_matmul`. Each device rounds its own part of a row: a row that is split
has a scale for each piece.

The matrix receives no gradient. `Packed` is every form of a matrix other than a floating array.

A matrix with a low-rank addition (`LowRank`) holds one of these forms or a floating array.

To add a form that a layer multiplies in a way of its own: a class that extends `WrappedMatrix`
(`sharding/products/wrapped.py`). To add a quantised one: its class in `Packed`, and a branch in
`quantized_einsum`, `quantized_groups` and `logical_axes`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import MixedArray, QuantizedArray, grouped_matmul, quantize, quantized_matmul
from pallas_kernels.backend import Implementation
from pallas_kernels.quantized_array import QuantizedDtype
from sharding.products.low_rank import LowRank
from sharding.products.wrapped import WrappedMatrix

Axes = tuple[str | None, ...]

Quantized = QuantizedArray | MixedArray
"""Matrix of a layer in few bits."""
Packed = Quantized | WrappedMatrix
"""Matrix of a layer that is not a floating array."""
Weight = Array | Packed | LowRank
"""Matrix of a layer in any form."""


def quantized_einsum(
    subscripts: str,
    x: Float[Array, ...],
    weight: Quantized,
    *,
    activations: QuantizedDtype | None,
    dtype: Any,
) -> Float[Array, ...]:
    """Return `jnp.einsum` of activations and a quantised matrix, both on one device.

    Args:
        subscripts: Subscripts of `jnp.einsum`; what is summed over is last in the first term and
            first in the second, in one order.
        x: Activations.
        weight: Matrix with scales along the last dimension that is summed over.
        activations: Dtype to which x is rounded, with a scale per row; None: not rounded. A
            MixedArray rounds x itself.
        dtype: Dtype of the result.

    Raises:
        ValueError: Other subscripts, or scales along another dimension.
    """
    inputs, result = subscripts.split("->")
    first, second = inputs.split(",")
    summed = "".join(letter for letter in first if letter in second)
    row_letters = first.removesuffix(summed)
    new = second.removeprefix(summed)
    if first != row_letters + summed or second != summed + new or result != row_letters + new:
        raise ValueError(
            f"{subscripts}: with a quantised matrix, what is summed over must be last in the"
            " first term, first in the second, and nowhere else"
        )
    rows = x.reshape(-1, math.prod(x.shape[len(row_letters) :]))
    matrix = flatten_matrix(weight, len(summed))
    if isinstance(weight, QuantizedArray) and activations is not None:
        rows = quantize(rows, activations, axis=-1)
    out = quantized_matmul(rows, matrix, out_dtype=dtype)
    return out.reshape(*x.shape[: len(row_letters)], *weight.shape[len(summed) :])


def quantized_groups(
    rows: Float[Array, "R k"],
    weight: Packed,
    group_sizes: Int[Array, " G"],
    *,
    activations: QuantizedDtype | None,
    implementation: Implementation | None,
) -> Float[Array, "R n"]:
    """Return rows times the quantised matrix of their group, in the dtype of the rows.

    Args:
        rows: Rows sorted by group.
        weight: Stack of matrices: G, one dimension that is summed over, the others.
        group_sizes: Number of rows of each group.
        activations: Dtype to which rows are rounded, with a scale per row; None: not rounded.
        implementation: Implementation of `grouped_matmul`.
    """
    if isinstance(weight, WrappedMatrix):
        return weight.multiply_groups(rows, group_sizes, implementation=implementation)
    options = {"implementation": implementation, "out_dtype": rows.dtype}
    if isinstance(weight, QuantizedArray) and activations is not None:
        rounded = quantize(rows, activations, axis=-1)
        if activations == "int4":  # grouped kernels read rows in 8 bits
            rounded = dataclasses.replace(rounded, values=rounded.values.astype(jnp.int8))
        return grouped_matmul(
            rounded, flatten_matrix(weight, 1, num_batch=1), group_sizes, **options
        )
    return grouped_matmul(rows, flatten_matrix(weight, 1, num_batch=1), group_sizes, **options)


def flatten_matrix(weight: Quantized, num_summed: int, num_batch: int = 0) -> Quantized:
    """Return a quantised matrix flattened to one dimension that is summed over and one that is not.

    Args:
        weight: Matrix with scales along the last dimension that is summed over.
        num_summed: Number of dimensions that are summed over.
        num_batch: Number of dimensions before them, which stay: one matrix for each.

    Raises:
        ValueError: Scales are along another dimension.
    """
    if isinstance(weight, MixedArray):
        inner = flatten_matrix(weight.weights, num_summed, num_batch)
        return dataclasses.replace(weight, weights=inner)
    last = num_batch + num_summed - 1
    if weight.axis is None or weight.ndim + weight.axis != last:
        raise ValueError(
            f"a quantised matrix {weight.shape} summed over {num_summed} dimensions must have its"
            f" scales along axis {last - weight.ndim}, not {weight.axis}: quantize it so"
        )

    def flat(part: Array) -> Array:
        shape = part.shape
        sizes = math.prod(shape[num_batch : last + 1]), math.prod(shape[last + 1 :])
        return part.reshape(*shape[:num_batch], *sizes)

    return QuantizedArray(values=flat(weight.values), scales=flat(weight.scales), axis=-2)


def logical_axes(weight: Weight, axes: Axes) -> Any:
    """Return the logical axes of a matrix, or of all its parts.

    Args:
        weight: The matrix.
        axes: Logical axes of the matrix without quantisation.
    """
    if isinstance(weight, LowRank):
        return weight.axes(logical_axes(weight.weight, axes), axes)
    if isinstance(weight, MixedArray):
        # `order` has the batch dimensions and, whole, one of channels.
        order = (*axes[: weight.order.ndim - 1], None)
        return dataclasses.replace(weight, weights=logical_axes(weight.weights, axes), order=order)
    if isinstance(weight, WrappedMatrix):
        return weight.logical_axes(axes)
    if not isinstance(weight, QuantizedArray):
        return axes
    scales = tuple(
        name if size > 1 else None for name, size in zip(axes, weight.scales.shape, strict=True)
    )
    return dataclasses.replace(weight, values=axes, scales=scales)
