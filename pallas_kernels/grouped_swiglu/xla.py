# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_swiglu without a kernel: rows are laid out once for all products.

    z = rows @ W_in[g] = [a | b]      h = silu(a) * b      out = h @ W_out[g]

    dh = d out @ W_out^T    da = dh * b * s * (1 + a * (1 - s))    db = dh * a * s    s = sigmoid(a)
    dz = [da | db]          d rows = dz @ W_in^T     dW_in = rows^T dz     dW_out = h^T d out

Two calls of `grouped_matmul` with the activation between them would move the rows to their layout
and back for each product, and keep five arrays of the size of h for the backward pass. Here the
layout (`pallas_kernels/grouped_matmul/layout.py`) is made once, and only z of the head is kept; the
overflow recomputes its z. Low-rank additions to a matrix are multiplied in the same layout.

Quantised matrices go through the products of `grouped_matmul`, which dequantise one at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.layout import (
    RowBlock,
    add_to_matrix,
    lay_out,
    over_blocks,
)
from pallas_kernels.grouped_matmul.products import grouped_matmul
from pallas_kernels.grouped_matmul.xla import PRODUCTS
from pallas_kernels.grouped_swiglu.additions import NO_ADDITIONS, AddedMatrix, Additions
from pallas_kernels.grouped_swiglu.rows import HIDDEN
from pallas_kernels.quantized_array import QuantizedArray


def _activate(z: Array) -> Array:
    gate, up = jnp.split(z, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _gradients(
    rows: Float[Array, "G C k"],
    z: Array,
    d_out: Float[Array, "G C k"],
    w_in: AddedMatrix,
    w_out: AddedMatrix,
    factors: Float[Array, "G C 1"] | None,
) -> tuple[Array, Array | None, AddedMatrix, AddedMatrix]:
    """Return the gradients of the rows (in their dtype), factors and both weights (f32)."""
    gate, up = jnp.split(z, 2, axis=-1)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_inner = w_out.times_transposed(d_out)
    inner = silu * up
    d_factors = None
    if factors is not None:
        products = d_inner.astype(jnp.float32) * inner.astype(jnp.float32)
        d_factors = jnp.sum(products, axis=-1, keepdims=True)
        d_inner, inner = _times(d_inner, factors), _times(inner, factors)
    d_gate = d_inner * up * (sigmoid + silu * (1.0 - sigmoid))
    d_z = jnp.concatenate([d_gate, d_inner * silu], axis=-1)
    d_rows = w_in.times_transposed(d_z)
    return d_rows, d_factors, w_in.gradient(rows, d_z), w_out.gradient(inner, d_out)


def _times(hidden: Array, factors: Array | None) -> Array:
    """Return hidden units times the factors [... 1] of their rows, in their dtype."""
    return (
        hidden if factors is None else (hidden.astype(jnp.float32) * factors).astype(hidden.dtype)
    )


def _flat(gate_up: Array) -> Array:
    return gate_up.reshape(*gate_up.shape[:2], -1)  # [G k 2 n] to [G k 2n]


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray,
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    row_factors: Float[Array, " R"] | None = None,
    *,
    additions: Additions = NO_ADDITIONS,
    down_is_turned: bool = False,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    del down_is_turned  # the compiler chooses the order
    factors = None if row_factors is None else row_factors[:, None]
    if not isinstance(gate_up, QuantizedArray) and not isinstance(down, QuantizedArray):
        w_in = AddedMatrix.of_factors(_flat(gate_up), additions.gate_up)
        w_out = AddedMatrix.of_factors(down, additions.down)
        return _in_one_layout(rows, w_in, w_out, group_sizes, factors)
    w_in = jax.tree.map(_flat, gate_up)
    if isinstance(w_in, QuantizedArray):
        w_in = dataclasses.replace(w_in, axis=None if w_in.axis is None else -2)
    z: Any = checkpoint_name(grouped_matmul(rows, w_in, group_sizes, rows.dtype, PRODUCTS), HIDDEN)
    hidden = _times(_activate(z), factors)
    return grouped_matmul(hidden, down, group_sizes, rows.dtype, PRODUCTS)


@jax.custom_vjp
def _in_one_layout(
    rows: Float[Array, "R k"],
    w_in: AddedMatrix,
    w_out: AddedMatrix,
    group_sizes: Int[Array, " G"],
    factors: Float[Array, "R 1"] | None,
) -> Float[Array, "R k"]:
    return _forward(rows, w_in, w_out, group_sizes, factors)[0]


def _forward(rows, w_in, w_out, group_sizes, factors):
    layout = lay_out(rows.shape[0], group_sizes)

    def add_block(out: Array, group: Array, block: RowBlock) -> Array:
        z = w_in.of(group).times(block.of(rows)[None])
        hidden = _times(_activate(z), _of(lambda x: block.of(x)[None], factors))
        return block.put(out, w_out.of(group).times(hidden)[0])

    z = checkpoint_name(w_in.times(layout.head_of(rows)), HIDDEN)
    out = layout.rows_of(w_out.times(_times(_activate(z), _of(layout.head_of, factors))))
    out = over_blocks(layout, add_block, out)
    return out, (rows, z, w_in, w_out, group_sizes, factors)


def _of(select: Callable[[Array], Array], factors: Array | None) -> Array | None:
    """Return the factors of some rows."""
    return None if factors is None else select(factors)


def _backward(residuals, d_out):
    rows, z, w_in, w_out, group_sizes, factors = residuals
    layout = lay_out(rows.shape[0], group_sizes)

    def add_block(sums: tuple[Any, ...], group: Array, block: RowBlock) -> tuple[Any, ...]:
        block_rows = block.of(rows)[None]
        matrices = (w_in.of(group), w_out.of(group))
        z = matrices[0].times(block_rows)
        own_factors = _of(lambda x: block.of(x)[None], factors)
        d_out_new = block.new_of(d_out)[None]
        d_rows, d_factors, *d_matrices = _gradients(
            block_rows, z, d_out_new, *matrices, own_factors
        )
        # Rows of the block before have their gradient already.
        is_new = (jnp.arange(block.size) >= block.num_seen)[:, None]

        def put(total: Array, part: Array) -> Array:
            return block.put(total, jnp.where(is_new, part[0], block.of(total)))

        return (
            put(sums[0], d_rows),
            None if d_factors is None else put(sums[1], d_factors),
            *(_add_to(total, group, d) for total, d in zip(sums[2:], d_matrices, strict=True)),
        )

    # Both heads are masked: rows past the last group may be NaN.
    d_rows, d_factors, *d_weights = _gradients(
        layout.head_of(rows),
        z,
        layout.head_of(d_out),
        w_in,
        w_out,
        _of(layout.head_of, factors),
    )
    d_factors = _of(layout.rows_of, d_factors)
    sums = over_blocks(layout, add_block, (layout.rows_of(d_rows), d_factors, *d_weights))
    d_in, d_out_matrix = (
        jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), total, matrix)
        for total, matrix in zip(sums[2:], (w_in, w_out), strict=True)
    )
    return sums[0], d_in, d_out_matrix, None, sums[1]


def _add_to(total: AddedMatrix, group: Array, part: AddedMatrix) -> AddedMatrix:
    """Add the gradient of one group's matrix."""
    return jax.tree.map(lambda sums, leaf: add_to_matrix(sums, group, leaf), total, part)


_in_one_layout.defvjp(_forward, _backward)
