# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The product of activations and a matrix that is stored in few bits, for inference.

    y = x @ (values * scales)                      x as it is              W8A16, W4A16
    y = (x / s -> int8) @ values * scales * s      a scale for each row    W8A8, W4A8, FP8

The matrix has any number of dimensions, those that are summed over first. Its scales lie in blocks
along the last of these, so that the matrix flattened to [k n] has equal blocks along k. Device code
does the rest: `pallas_kernels.quantized_matmul`. What lies on another device is rounded there: a
row that is cut has a scale for each piece.

No gradient goes to the matrix.
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
    """`jnp.einsum` of activations and a quantised matrix, both on one device.

    Args:
        subscripts: as for `jnp.einsum`; what is summed over stands last in the first term and first
            in the second, in one order.
        x: activations.
        weight: with scales along the last dimension that is summed over.
        activations: what they are rounded to, a scale per row; None: they stay floating.
        dtype: of the result.

    Raises:
        ValueError: other subscripts, or scales along another dimension.
    """
    left, result = subscripts.split("->")
    first, second = left.split(",")
    summed = "".join(letter for letter in first if letter in second)
    kept, new = first.removesuffix(summed), second.removeprefix(summed)
    if first != kept + summed or second != summed + new or result != kept + new:
        raise ValueError(
            f"{subscripts}: with a quantised matrix, what is summed over must stand last in the"
            " first term, first in the second, and nowhere else"
        )
    rows = x.reshape(-1, math.prod(x.shape[len(kept) :]))
    matrix = flattened(weight, len(summed))
    out = quantized_matmul(rounded(rows, activations), matrix, out_dtype=dtype)
    return out.reshape(*x.shape[: len(kept)], *weight.shape[len(summed) :])


def rounded(
    rows: Float[Array, "R k"], activations: QuantizedDtype | None
) -> Float[Array, "R k"] | QuantizedArray:
    """Rows in few bits, a scale for each; as they are when None.

    Args:
        rows: any.
        activations: what they become.
    """
    return rows if activations is None else quantize(rows, activations, axis=-1)


def flattened(weight: QuantizedArray, num_summed: int, num_batch: int = 0) -> QuantizedArray:
    """A quantised matrix of many dimensions with one that is summed over and one that is not.

    Args:
        weight: with scales along the last dimension that is summed over.
        num_summed: dimensions that are summed over.
        num_batch: dimensions before them, which stay: one matrix for each.

    Raises:
        ValueError: scales along another dimension.
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
    """The logical axes of a matrix, or those of both parts of a quantised one.

    Args:
        weight: the matrix.
        axes: as if it were not quantised.
    """
    if not isinstance(weight, QuantizedArray):
        return axes
    scales = tuple(
        name if size > 1 else None for name, size in zip(axes, weight.scales.shape, strict=True)
    )
    # A tree of axes in the structure of the array.
    return dataclasses.replace(weight, values=axes, scales=scales)
