# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_matmul for TPUs, in Mosaic: both products as `PRODUCTS`.

    multiply    multiply.py, with scales as in factors.py
    contract    contract.py

Sizes are arbitrary: values past an edge are masked or dropped. Rows are not gathered by token here,
which `grouped_swiglu` can do (gather.py), and not weighted and added up per token after the last
product: K rows of a token come from K visits, so that each would read and write the token's sum in
float32, 8 bytes per value and row, against the 2 + 2 of writing rows and reading them in one
gather-and-sum.

Call it on local arrays, in a `jax.shard_map`: an array sharded by the compiler is gathered first.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.grouped_matmul.tpu.contract import contract_parts
from pallas_kernels.grouped_matmul.tpu.factors import dtypes_of, factors_of
from pallas_kernels.grouped_matmul.tpu.multiply import multiply_and
from pallas_kernels.quantized_array import QuantizedArray, constant


def _multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
) -> Array:
    # Axes of scales count from the end: a new dimension in front moves none.
    matrices = jax.tree.map(lambda leaf: leaf[:, None], weights)
    factors = factors_of(rows, matrices, is_turned=is_turned)
    (out,) = multiply_and(
        lambda sums, extras: [sums], factors, group_sizes, [(1, out_dtype)], is_turned=is_turned
    )
    return out[0]


def _contract(
    rows: Float[Array, "R k"] | QuantizedArray,
    other_rows: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Float[Array, "G k n"]:
    if isinstance(rows, QuantizedArray) and isinstance(other_rows, QuantizedArray):
        out = contract_parts(
            rows.values,
            other_rows.values[None],
            group_sizes,
            out_dtype=out_dtype,
            dtypes=dtypes_of(rows.values.dtype, other_rows.values.dtype),
            scale=(rows.scales.astype(jnp.float32) * other_rows.scales.astype(jnp.float32))[0, 0],
        )
    else:
        wide = constant(rows)
        rhs = constant(other_rows)
        out = contract_parts(wide, rhs[None], group_sizes, out_dtype=out_dtype)
    return out[:, 0]


PRODUCTS = Products(multiply=_multiply, contract=_contract)
