# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""grouped_matmul without a kernel: one batched product, then a loop over what overflows.

XLA turns jax.lax.ragged_dot into G dense products on the CPU, and a loop over blocks of rows packs
the group's matrix again for every block. So most rows go into one batched product, and only what
is past the mean size of a group into a loop (`layout.py`).

    out = rows @ W[g]    d rows = d out @ W[g]^T    d W[g] = sum over the rows of g of rows^T d out

The gradient of the rows is the same product with the matrices turned; that of the weights adds the
blocks of the overflow to the batched product in place. It runs everywhere and is tuned on the CPU,
where the batched product has the dense rate and a block of overflow about half of it: balanced
groups are fast, and one group that holds everything takes about twice the dense time.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.layout import (
    Block,
    Layout,
    add_to_matrix,
    lay_out,
    matrix_of,
    over_blocks,
)
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.quantized_array import QuantizedArray, constant


def _product(rows: Array, weights: Array, layout: Layout, turned: bool, out_dtype: Any) -> Array:
    equation = "crn,ckn->crk" if turned else "crk,ckn->crn"

    def multiply(blocks: Array, matrices: Array) -> Array:
        out = jnp.einsum(equation, blocks, matrices, preferred_element_type=jnp.float32)
        return out.astype(out_dtype)

    def add_block(out: Array, group: Array, block: Block) -> Array:
        product = multiply(block.of(rows)[None], matrix_of(weights, group))[0]
        return block.put(out, product)

    out = layout.rows_of(multiply(rows[layout.slots], weights))
    return over_blocks(layout, add_block, out)


def _weight_gradient(rows: Array, d_out: Array, layout: Layout) -> Array:
    def contract(rows: Array, d_out: Array) -> Array:
        return jnp.einsum("crk,crn->ckn", rows, d_out, preferred_element_type=jnp.float32)

    def add_block(total: Array, group: Array, block: Block) -> Array:
        part = contract(block.of(rows)[None], block.new_of(d_out)[None])
        return add_to_matrix(total, group, part)

    # Both heads are masked: what stands past the last group may be NaN.
    total = contract(layout.head_of(rows), layout.head_of(d_out))
    return over_blocks(layout, add_block, total)


def _multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
) -> Array:
    rows, weights = constant(rows), constant(weights)
    weights = weights.astype(rows.dtype)
    layout = lay_out(rows.shape[0], group_sizes)
    return _product(rows, weights, layout, is_turned, out_dtype)


def _contract(
    rows: Float[Array, "R k"] | QuantizedArray,
    others: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Float[Array, "G k n"]:
    rows, others = constant(rows), constant(others)
    return _weight_gradient(rows, others, lay_out(rows.shape[0], group_sizes)).astype(out_dtype)


PRODUCTS = Products(multiply=_multiply, contract=_contract)
