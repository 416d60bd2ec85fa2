# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what an implementation of grouped_matmul consists of, and the gradient shared by all.

    multiply   out[r] = rows[r] @ weights[g]        is_turned: rows[r] @ weights[g]^T
    contract   out[g] = sum over the rows r of g of rows[r]^T other_rows[r]

    d rows = multiply(d out, weights), transposed    d weights = contract(rows, d out)

Rows past the last group may hold anything and are not read; `multiply` gives 0 there. An empty
group contracts to 0. Quantised operands are constants, without a gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.quantized_array import QuantizedArray


class Products(NamedTuple):
    """The two products of one implementation; hashable."""

    multiply: Callable[..., Array]
    """(rows [R k], weights [G k n], group_sizes [G] i32, *, is_turned, out_dtype) -> [R n].

    With is_turned, rows are [R n] and the result [R k]. Either factor may be a QuantizedArray: rows
    with scales along -1, weights along -2 whether transposed or not, or either with one scale.
    """
    contract: Callable[..., Array]
    """(rows [R k], other_rows [R n], group_sizes [G] i32, *, out_dtype) -> [G k n].

    Both may be QuantizedArrays of one scale.
    """


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_matmul(
    rows: Float[Array, "R k"] | QuantizedArray,
    weights: Float[Array, "G k n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    out_dtype: Any,
    products: Products,
) -> Float[Array, "R n"]:
    """Return the product by one implementation, with its own gradient."""
    return products.multiply(rows, weights, group_sizes, is_turned=False, out_dtype=out_dtype)


def _forward(rows, weights, group_sizes, out_dtype, products):
    out = grouped_matmul(rows, weights, group_sizes, out_dtype, products)
    return out, (rows, weights, group_sizes)


def _backward(out_dtype, products, residuals, d_out):
    del out_dtype
    rows, weights, group_sizes = residuals
    d_rows = d_weights = None
    if not isinstance(rows, QuantizedArray):
        d_out = d_out.astype(rows.dtype)
        d_rows = products.multiply(
            d_out, weights, group_sizes, is_turned=True, out_dtype=rows.dtype
        )
    if not isinstance(weights, QuantizedArray):  # then the rows are not quantised either
        d_weights = products.contract(rows, d_out, group_sizes, out_dtype=weights.dtype)
    return d_rows, d_weights, None


grouped_matmul.defvjp(_forward, _backward)
