# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""grouped_matmul for TPUs, in Mosaic: both products as `PRODUCTS`.

    multiply    pallas_tpu_multiply.py, scales as pallas_tpu_factors.py says
    contract    pallas_tpu_contract.py

Any sizes go: what lies past an edge is masked, or dropped. Two gaps are left to XLA. Rows that
arrive by token (a gather before the first product) are not gathered here: rows of bfloat16 share
32-bit words with their neighbour in a TPU's tiles of memory, so that no copy of a single row exists
(Mosaic: "Offsets along tiled dimensions must be aligned to tiles", 8 rows); in float32 the copy
exists, and moves twice the bytes for every row and every tile of columns, where XLA writes and the
kernel reads 2 * 2 bytes per value once. And rows are not weighted and added up per token behind the
last product: K rows of a token come from K visits, so that each would read and write the token's
sum in float32, 8 bytes per value and row, against the 2 + 2 of writing rows and reading them in one
gather-and-sum.

Call it on local arrays, in a `jax.shard_map`: an array spread by the compiler is gathered first.
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
    # The axes of scales are counted from the end: one more in front of the matrix moves none.
    matrices = jax.tree.map(lambda leaf: leaf[:, None], weights)
    factors = factors_of(rows, matrices, is_turned=is_turned)
    (out,) = multiply_and(
        lambda sums, extras: [sums], factors, group_sizes, [(1, out_dtype)], is_turned=is_turned
    )
    return out[0]


def _contract(
    rows: Float[Array, "R k"] | QuantizedArray,
    others: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Float[Array, "G k n"]:
    if isinstance(rows, QuantizedArray) and isinstance(others, QuantizedArray):
        out = contract_parts(
            rows.values,
            others.values[None],
            group_sizes,
            out_dtype=out_dtype,
            dtypes=dtypes_of(rows.values.dtype, others.values.dtype),
            scale=(rows.scales.astype(jnp.float32) * others.scales.astype(jnp.float32))[0, 0],
        )
    else:
        wide, right = constant(rows), constant(others)
        out = contract_parts(wide, right[None], group_sizes, out_dtype=out_dtype)
    return out[:, 0]


PRODUCTS = Products(multiply=_multiply, contract=_contract)
