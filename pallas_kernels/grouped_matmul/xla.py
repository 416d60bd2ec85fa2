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

import jax
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


def _product(rows: Array, weights: Array, layout: Layout, turned: bool) -> Array:
    equation = "crn,ckn->crk" if turned else "crk,ckn->crn"

    def multiply(blocks: Array, matrices: Array) -> Array:
        out = jnp.einsum(equation, blocks, matrices, preferred_element_type=jnp.float32)
        return out.astype(rows.dtype)

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


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "R k"], weights: Float[Array, "G k n"], group_sizes: Int[Array, " G"]
) -> Float[Array, "R n"]:
    """See `pallas_kernels.grouped_matmul`."""
    return _product(rows, weights, lay_out(rows.shape[0], group_sizes), turned=False)


def _forward(rows, weights, group_sizes):
    return grouped_matmul(rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(residuals, d_out):
    rows, weights, group_sizes = residuals
    layout = lay_out(rows.shape[0], group_sizes)
    d_rows = _product(d_out, weights, layout, turned=True)
    d_weights = _weight_gradient(rows, d_out, layout)
    return d_rows, d_weights.astype(weights.dtype), None


grouped_matmul.defvjp(_forward, _backward)
