# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products of activations and a quantised matrix, for inference.

    y = x @ (values * scales)                      x not rounded           W8A16, W4A16
    y = (x / s -> int8) @ values * scales * s      a scale for each row    W8A8, W4A8, FP8

The matrix has any number of dimensions, those that are summed over first. Its scales are in blocks
along the last of these, so that the matrix flattened to [k n] has equal blocks along k. The product
is `pallas_kernels.quantized_matmul`. Each device rounds its own part of a row: a row that is split
has a scale for each piece.

The matrix receives no gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels import QuantizedArray, quantize, quantized_matmul
from pallas_kernels.quantized_array import QuantizedDtype

Axes = tuple[str | None, ...]


def quantized_einsum(
    subscripts: str,
    x: Float[Array, ...],
    weight: QuantizedArray,
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
        activations: Dtype to which x is rounded, with a scale per row; None: not rounded.
        dtype: Dtype of the result.

    Raises:
        ValueError: Other subscripts, or scales along another dimension.
    """
    left, result = subscripts.split("->")
    first, second = left.split(",")
    summed = "".join(letter for letter in first if letter in second)
    kept, new = first.removesuffix(summed), second.removeprefix(summed)
    if first != kept + summed or second != summed + new or result != kept + new:
        raise ValueError(
            f"{subscripts}: with a quantised matrix, what is summed over must be last in the"
            " first term, first in the second, and nowhere else"
        )
    rows = x.reshape(-1, math.prod(x.shape[len(kept) :]))
    matrix = flattened(weight, len(summed))
    out = quantized_matmul(rounded(rows, activations), matrix, out_dtype=dtype)
    return out.reshape(*x.shape[: len(kept)], *weight.shape[len(summed) :])


def rounded(
    rows: Float[Array, "R k"], activations: QuantizedDtype | None
) -> Float[Array, "R k"] | QuantizedArray:
    """Return rows quantised with a scale for each.

    Args:
        rows: Rows of activations.
        activations: Dtype of the result; None: the rows are returned unchanged.
    """
    return rows if activations is None else quantize(rows, activations, axis=-1)


def flattened(weight: QuantizedArray, num_summed: int, num_batch: int = 0) -> QuantizedArray:
    """Return a quantised matrix flattened to one dimension that is summed over and one that is not.

    Args:
        weight: Matrix with scales along the last dimension that is summed over.
        num_summed: Number of dimensions that are summed over.
        num_batch: Number of dimensions before them, which stay: one matrix for each.

    Raises:
        ValueError: Scales are along another dimension.
    """
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


def logical_axes(weight: Array | QuantizedArray, axes: Axes) -> Any:
    """Return the logical axes of a matrix, or of both parts of a quantised one.

    Args:
        weight: The matrix.
        axes: Logical axes of the matrix without quantisation.
    """
    if not isinstance(weight, QuantizedArray):
        return axes
    scales = tuple(
        name if size > 1 else None for name, size in zip(axes, weight.scales.shape, strict=True)
    )
    return dataclasses.replace(weight, values=axes, scales=scales)
