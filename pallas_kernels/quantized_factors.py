# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Checks which pairs of factors a product takes, for all implementations.

    floating x floating     of one dtype
    floating x quantised    the second becomes floating, in the dtype of the first
    quantised x quantised   integers with integers (int8, int4), float8 with float8

Sums of integers are kept in int32, which holds `largest_sum` of the largest products.
"""

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.quantized_array import QuantizedArray


def check_factors(
    operation: str, factors: dict[str, Any], axes: tuple[int | None, int | None]
) -> None:
    """Raise if two factors do not fit together.

    Args:
        operation: Operation, for the message.
        factors: The two factors by name.
        axes: Axis along which the scales of each factor may vary; None allows one scale only.

    Raises:
        ValueError: Dtypes do not fit together, scales vary along another axis, or a sum of
            integers would not fit in int32.
    """
    (first, x), (second, w) = factors.items()
    for (name, array), axis in zip(factors.items(), axes, strict=True):
        if not isinstance(array, QuantizedArray):
            continue
        _check_scales(operation, name, array)
        if array.axis not in (None, axis):
            raise ValueError(
                f"{operation}: {name} has scales along axis {array.axis}, and the product sums over"
                f" {'rows' if axis is None else f'axis {axis}'}: quantize it with axis={axis}."
            )
    if isinstance(x, QuantizedArray):
        is_fitting = isinstance(w, QuantizedArray) and _kind(x) == _kind(w)
        rule = "both be quantised, and both be integers or both float8: quantize both alike"
    else:
        is_fitting = isinstance(w, QuantizedArray) or x.dtype == w.dtype
        is_fitting = is_fitting and jnp.issubdtype(x.dtype, jnp.floating)
        rule = "have the same floating dtype: cast one of them with .astype"
    if not is_fitting:
        raise ValueError(
            f"{operation}: {first} ({_in_words(x)}) and {second} ({_in_words(w)}) must {rule}."
        )
    terms = largest_sum(x, w)
    if axes[0] is not None and terms is not None:
        length = x.shape[axes[0]] // math.lcm(x.num_blocks, w.num_blocks)
        if length > terms:
            raise ValueError(
                f"{operation}: {length} products of integers share a scale, and only {terms} are "
                "sure to fit in int32: quantize with a block_size."
            )


def largest_sum(x: Any, w: Any) -> int | None:
    """Return how many products of integer factors fit in int32; None for other factors."""
    if not all(isinstance(a, QuantizedArray) and _kind(a) for a in (x, w)):
        return None
    largest = math.prod(7 if a.values.dtype == jnp.int4 else 127 for a in (x, w))
    return (2**31 - 1) // largest


def _check_scales(operation: str, name: str, x: QuantizedArray) -> None:
    """Raise if scales do not fit, as in arrays that `quantize` has not made."""
    form = x.dtype_name
    values = x.values.shape
    scales = x.scales.shape
    if len(scales) != len(values):
        is_fitting = False
    elif x.axis is None:
        is_fitting = all(s in (1, v) for s, v in zip(scales, values, strict=True))
        is_fitting = is_fitting and set(scales[-2:]) <= {1}
    else:
        axis = len(values) + x.axis
        free_axes = [i for i in range(len(values)) if i != axis]
        is_fitting = all(scales[i] == values[i] for i in free_axes)
        is_fitting = is_fitting and scales[axis] > 0 and values[axis] % scales[axis] == 0
    if not is_fitting:
        raise ValueError(
            f"{operation}: {name} is {form} {values} along axis {x.axis}, and its scales are "
            f"{scales}: make it with quantize (with jax.vmap for one scale of each matrix)."
        )


def _kind(x: QuantizedArray) -> bool:
    return jnp.issubdtype(x.values.dtype, jnp.integer)


def _in_words(x: Any) -> str:
    return f"quantised {x.dtype_name}" if isinstance(x, QuantizedArray) else str(x.dtype)
