# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_swiglu without a kernel: rows are laid out once for all products.

    z = rows @ W_in[g] = [a | b]      h = silu(a) * b      out = h @ W_out[g]

    dh = d out @ W_out^T    da = dh * b * s * (1 + a * (1 - s))    db = dh * a * s    s = sigmoid(a)
    dz = [da | db]          d rows = dz @ W_in^T     dW_in = rows^T dz     dW_out = h^T d out

Two calls of `grouped_matmul` with the activation between them would move the rows to their layout
and back for each product, and keep five arrays of the size of h for the backward pass. Here the
layout (`pallas_kernels/grouped_matmul/layout.py`) is made once, and only z of the head is kept; the
overflow recomputes its z.

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
    matrix_of,
    over_blocks,
)
from pallas_kernels.grouped_matmul.products import grouped_matmul
from pallas_kernels.grouped_matmul.xla import PRODUCTS
from pallas_kernels.grouped_swiglu.residuals import HIDDEN
from pallas_kernels.quantized_array import QuantizedArray


def _dot(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def _activate(z: Array) -> Array:
    gate, up = jnp.split(z, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _gradients(
    rows: Float[Array, "G C k"],
    z: Array,
    d_out: Float[Array, "G C k"],
    w_in: Float[Array, "G k z"],
    w_out: Float[Array, "G n k"],
    factors: Float[Array, "G C 1"] | None,
) -> tuple[Array, Array | None, Array, Array]:
    """Return the gradients of the rows (in their dtype), factors and both weights (f32)."""
    gate, up = jnp.split(z, 2, axis=-1)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_inner = _dot("crk,cnk->crn", d_out, w_out).astype(z.dtype)
    inner = silu * up
    d_factors = None
    if factors is not None:
        products = d_inner.astype(jnp.float32) * inner.astype(jnp.float32)
        d_factors = jnp.sum(products, axis=-1, keepdims=True)
        d_inner, inner = _times(d_inner, factors), _times(inner, factors)
    d_gate = d_inner * up * (sigmoid + silu * (1.0 - sigmoid))
    d_z = jnp.concatenate([d_gate, d_inner * silu], axis=-1)
    d_rows = _dot("crz,ckz->crk", d_z, w_in).astype(z.dtype)
    d_w_in, d_w_out = _dot("crk,crz->ckz", rows, d_z), _dot("crn,crk->cnk", inner, d_out)
    return d_rows, d_factors, d_w_in, d_w_out


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
    down_is_turned: bool = False,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    del down_is_turned  # the compiler chooses the order
    factors = None if row_factors is None else row_factors[:, None]
    if not any(isinstance(weights, QuantizedArray) for weights in (gate_up, down)):
        return _in_one_layout(rows, gate_up, down, group_sizes, factors)
    w_in = jax.tree.map(_flat, gate_up)
    if isinstance(w_in, QuantizedArray):
        w_in = dataclasses.replace(w_in, axis=None if w_in.axis is None else -2)
    z: Any = checkpoint_name(grouped_matmul(rows, w_in, group_sizes, rows.dtype, PRODUCTS), HIDDEN)
    hidden = _times(_activate(z), factors)
    return grouped_matmul(hidden, down, group_sizes, rows.dtype, PRODUCTS)


@jax.custom_vjp
def _in_one_layout(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"],
    down: Float[Array, "G n k"],
    group_sizes: Int[Array, " G"],
    factors: Float[Array, "R 1"] | None,
) -> Float[Array, "R k"]:
    return _forward(rows, gate_up, down, group_sizes, factors)[0]


def _forward(rows, gate_up, down, group_sizes, factors):
    layout = lay_out(rows.shape[0], group_sizes)
    w_in = _flat(gate_up)

    def project(x: Array, matrices: Array) -> Array:
        return _dot("crk,ckz->crz", x, matrices).astype(rows.dtype)

    def add_block(out: Array, group: Array, block: RowBlock) -> Array:
        z = project(block.of(rows)[None], matrix_of(w_in, group))
        hidden = _times(_activate(z), _of(lambda x: block.of(x)[None], factors))
        return block.put(out, project(hidden, matrix_of(down, group))[0])

    z = checkpoint_name(project(layout.head_of(rows), w_in), HIDDEN)
    out = layout.rows_of(project(_times(_activate(z), _of(layout.head_of, factors)), down))
    out = over_blocks(layout, add_block, out)
    return out, (rows, z, gate_up, down, group_sizes, factors)


def _of(select: Callable[[Array], Array], factors: Array | None) -> Array | None:
    """Return the factors of some rows."""
    return None if factors is None else select(factors)


def _backward(residuals, d_out):
    rows, z, gate_up, down, group_sizes, factors = residuals
    layout = lay_out(rows.shape[0], group_sizes)
    w_in = _flat(gate_up)

    def add_block(sums: tuple[Any, ...], group: Array, block: RowBlock) -> tuple[Any, ...]:
        block_rows = block.of(rows)[None]
        matrices = (matrix_of(w_in, group), matrix_of(down, group))
        z = _dot("crk,ckz->crz", block_rows, matrices[0]).astype(rows.dtype)
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
            *(add_to_matrix(s, group, d) for s, d in zip(sums[2:], d_matrices, strict=True)),
        )

    # Both heads are masked: rows past the last group may be NaN.
    d_rows, d_factors, *d_weights = _gradients(
        layout.head_of(rows),
        z,
        layout.head_of(d_out),
        w_in,
        down,
        _of(layout.head_of, factors),
    )
    d_factors = _of(layout.rows_of, d_factors)
    sums = over_blocks(layout, add_block, (layout.rows_of(d_rows), d_factors, *d_weights))
    d_gate_up = sums[2].reshape(gate_up.shape).astype(gate_up.dtype)
    return sums[0], d_gate_up, sums[3].astype(down.dtype), None, sums[1]


_in_one_layout.defvjp(_forward, _backward)
