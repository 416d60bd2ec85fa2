# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_matmul without a kernel: one batched product, then a loop over the overflow.

XLA turns jax.lax.ragged_dot into G dense products on the CPU, and a loop over blocks of rows packs
the group's matrix again for every block. Most rows therefore go into one batched product, and only
those past the mean size of a group into a loop (layout.py).

    out = rows @ W[g]    d rows = d out @ W[g]^T    d W[g] = sum over the rows of g of rows^T d out

The gradient of the rows is the same product with transposed matrices; that of the weights adds the
blocks of the overflow to the batched product in place. It runs everywhere and is tuned on the CPU,
where the batched product has the dense rate and a block of overflow about half of it: balanced
groups are fast, and a single group with all rows takes about twice the dense time.

Quantised matrices are taken one after the other by the product of `quantized_matmul`: only one of
them at a time is dequantised, which on the CPU is also faster than the batched product of int8. The
sums of `grouped_outer` over quantised rows are integers until a group is complete.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.layout import (
    Layout,
    RowBlock,
    add_to_matrix,
    lay_out,
    matrix_of,
    over_blocks,
)
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_matmul.xla import (
    multiplied_dtype,
    quantized_matmul,
    times_transposed,
)


def _product(rows: Array, weights: Array, layout: Layout, turned: bool, out_dtype: Any) -> Array:
    equation = "crn,ckn->crk" if turned else "crk,ckn->crn"

    def multiply(blocks: Array, matrices: Array) -> Array:
        out = jnp.einsum(equation, blocks, matrices, preferred_element_type=jnp.float32)
        return out.astype(out_dtype)

    def add_block(out: Array, group: Array, block: RowBlock) -> Array:
        product = multiply(block.of(rows)[None], matrix_of(weights, group))[0]
        return block.put(out, product)

    out = layout.rows_of(multiply(rows[layout.slots], weights))
    return over_blocks(layout, add_block, out)


def _weight_gradient(rows: Array, d_out: Array, layout: Layout) -> Array:
    def contract(rows: Array, d_out: Array) -> Array:
        if rows.dtype == jnp.int8:
            return _contract_integers(rows, d_out)
        return jnp.einsum("crk,crn->ckn", rows, d_out, preferred_element_type=jnp.float32)

    def add_block(total: Array, group: Array, block: RowBlock) -> Array:
        part = contract(block.of(rows)[None], block.new_of(d_out)[None])
        return add_to_matrix(total, group, part)

    # Both heads are masked: rows past the last group may be NaN.
    total = contract(layout.head_of(rows), layout.head_of(d_out))
    return over_blocks(layout, add_block, total)


def _contract_integers(rows: Array, other_rows: Array) -> Array:
    """Transpose first, and multiply one by one.

    XLA has a fast int8 product on the CPU for rows times columns only (another one takes three
    times as long), and would undo the transpose.
    """
    turned = jax.lax.optimization_barrier(jnp.swapaxes(rows, 1, 2))

    def product(pair: tuple[Array, Array]) -> Array:
        return jnp.matmul(*pair, preferred_element_type=jnp.int32)

    return jax.lax.map(product, (turned, other_rows))


def _quantized_product(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    layout: Layout,
    turned: bool,
    out_dtype: Any,
) -> Array:
    rows = _with_scales_by(rows, 0)
    weights = _with_scales_by(weights, 0)

    def multiply(factors: tuple[Any, Any]) -> Array:
        block, matrix = factors
        if turned:
            return times_transposed(block, matrix, out_dtype)
        return quantized_matmul(block, matrix, out_dtype)

    def add_block(out: Array, group: Array, block: RowBlock) -> Array:
        matrix = jax.tree.map(lambda leaf: matrix_of(leaf, group)[0], weights)
        return block.put(out, multiply((jax.tree.map(block.of, rows), matrix)))

    head = jax.tree.map(lambda leaf: leaf[layout.slots], rows)
    out = layout.rows_of(jax.lax.map(multiply, (head, weights)))
    return over_blocks(layout, add_block, out)


def _with_scales_by(x: Array | QuantizedArray, axis: int) -> Array | QuantizedArray:
    """Return one scale per index of the axis where there was one for all."""
    if not isinstance(x, QuantizedArray):
        return x
    shape = list(x.scales.shape)
    shape[axis] = x.shape[axis]
    return dataclasses.replace(x, scales=jnp.broadcast_to(x.scales, shape))


def _multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
) -> Array:
    layout = lay_out(rows.shape[0], group_sizes)
    if isinstance(rows, QuantizedArray) or isinstance(weights, QuantizedArray):
        return _quantized_product(rows, weights, layout, is_turned, out_dtype)
    return _product(rows, weights, layout, is_turned, out_dtype)


def _contract(
    rows: Float[Array, "R k"] | QuantizedArray,
    other_rows: Float[Array, "R n"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Float[Array, "G k n"]:
    dtype = multiplied_dtype(rows, other_rows)
    (rows, scale), (other_rows, other_scale) = (_with_scale(x, dtype) for x in (rows, other_rows))
    out = _weight_gradient(rows, other_rows, lay_out(rows.shape[0], group_sizes))
    return (out.astype(jnp.float32) * scale * other_scale).astype(out_dtype)


def _with_scale(x: Any, dtype: Any) -> tuple[Array, Array]:
    """Return the values to multiply, and the factor of the result."""
    if not isinstance(x, QuantizedArray):
        return x.astype(dtype), jnp.ones((), jnp.float32)
    return x.values.astype(dtype), x.scales.astype(jnp.float32).reshape(())


PRODUCTS = Products(multiply=_multiply, contract=_contract)
