# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Which pairs of factors a product takes, whoever computes it.

    floating x floating     of one dtype
    floating x quantised    the second becomes floating, of the dtype of the first
    quantised x quantised   integers with integers (int8, int4), float8 with float8

To let a pair in: here, in the oracles, and in every implementation or its refusal.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.quantized_array import QuantizedArray


def check_factors(
    operation: str, factors: dict[str, Any], axes: tuple[int | None, int | None]
) -> None:
    """Refuses two factors that do not go together.

    Args:
        operation: Its name, for the message.
        factors: The two, by name.
        axes: Of each the axis along which its scales may lie; None: only one scale is taken.

    Raises:
        ValueError: Their dtypes do not go together, or scales lie along another axis.
    """
    (first, x), (second, w) = factors.items()
    for (name, array), axis in zip(factors.items(), axes, strict=True):
        if isinstance(array, QuantizedArray) and array.axis not in (None, axis):
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


def _kind(x: QuantizedArray) -> bool:
    return jnp.issubdtype(x.values.dtype, jnp.integer)


def _in_words(x: Any) -> str:
    return f"quantised {x.dtype_name}" if isinstance(x, QuantizedArray) else str(x.dtype)
