# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_swiglu for NVIDIA GPUs with the products of grouped_matmul.

    z = rows @ W_in[g] = [a | b]      h = silu(a) * b      out = h @ W_out[g]

    dh = d out @ W_out^T    da = dh * b * s * (1 + a * (1 - s))    db = dh * a * s    s = sigmoid(a)
    dz = [da | db]          d rows = dz @ W_in^T     dW_in = rows^T dz     dW_out = h^T d out

With factors of rows, h = silu(a) * b * factors, and d factors = sum of silu(a) * b * dh.

The first product has both matrices in one, so that rows are read once. z is kept, and h recomputed
from it. XLA computes the activation, which reads and writes 6 n values of every row; a kernel with
an activation in its epilogue would not. Rows past the last group have z = 0.

Rows of tokens are gathered before. A Hopper GPU has no copy of rows by index that Pallas reaches:
gathers of its tensor memory accelerator are of compute capability 10.0 (`tile::gather4`), and the
copies by single threads (`cp.async`) have no primitive in jax 0.10.2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.gpu.kernels import PRODUCTS
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.grouped_swiglu.rows import HIDDEN
from pallas_kernels.quantized_array import QuantizedArray


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray,
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    row_factors: Float[Array, " R"] | None = None,
    *,
    down_is_turned: bool = False,
    products: Products = PRODUCTS,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    del down_is_turned
    if isinstance(gate_up, QuantizedArray):
        # One scale is [G 1 1 1], and scales of channels are [G blocks 2 n].
        w_in = jax.tree.map(_flat, gate_up)
        w_in = dataclasses.replace(w_in, axis=None if gate_up.axis is None else -2)
    else:
        w_in = _flat(gate_up)
    return _experts(products, rows, w_in, down, group_sizes, row_factors)


def _flat(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)  # [G k 2 n] to [G k 2n]


def _activate(z: Array, factors: Array | None) -> Array:
    gate, up = jnp.split(z.astype(jnp.float32), 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    return (hidden if factors is None else hidden * factors[:, None]).astype(z.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    products: Products,
    rows: Array,
    w_in: Array | QuantizedArray,
    w_out: Array | QuantizedArray,
    group_sizes: Array,
    factors: Array | None,
) -> Array:
    """Return the rows through the experts; both matrices are [G k n]."""
    return _forward(products, rows, w_in, w_out, group_sizes, factors)[0]


def _forward(products, rows, w_in, w_out, group_sizes, factors):
    z = checkpoint_name(_multiply(products, rows, w_in, group_sizes), HIDDEN)
    out = _multiply(products, _activate(z, factors), w_out, group_sizes)
    return out, (rows, z, w_in, w_out, group_sizes, factors)


def _backward(products, residuals, d_out):
    rows, z, w_in, w_out, group_sizes, factors = residuals
    hidden, pull = jax.vjp(_activate, z, factors)
    d_z, d_factors = pull(_multiply(products, d_out, w_out, group_sizes, is_turned=True))
    d_rows = _multiply(products, d_z, w_in, group_sizes, is_turned=True)
    d_in = _contract(products, rows, d_z, w_in, group_sizes)
    d_w_out = _contract(products, hidden, d_out, w_out, group_sizes)
    return d_rows, d_in, d_w_out, None, d_factors


_experts.defvjp(_forward, _backward)


def _multiply(
    products: Products, rows: Array, weights: Any, group_sizes: Array, *, is_turned: bool = False
) -> Array:
    """Return the product in the dtype of the rows."""
    dtype = rows.dtype
    return products.multiply(rows, weights, group_sizes, is_turned=is_turned, out_dtype=dtype)


def _contract(
    products: Products, rows: Array, other_rows: Array, weights: Any, group_sizes: Array
) -> Array | None:
    """Return the gradient of the weights, None where they are quantised."""
    if isinstance(weights, QuantizedArray):
        return None
    return products.contract(rows, other_rows, group_sizes, out_dtype=weights.dtype)
