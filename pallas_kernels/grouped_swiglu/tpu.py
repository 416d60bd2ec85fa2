# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_swiglu for TPUs: five calls of the kernels of grouped_matmul.

    forward     z = [a | b] = rows @ W_in, h = silu(a) * b             one kernel; out = h @ W_out
    backward    dz, h from (d out @ W_out^T) and z                     one kernel
                d rows = dz @ W_in^T, both halves in one sum; dW_in = rows^T dz, dW_out = h^T d out

Activations are computed inside the kernels. Without a gradient z stays in the core: per row
2 * 2n values fewer are written and read. With one z is written, and kept: in bfloat16 8 n bytes of
traffic per row, for n = 1000 and k = 2048 that is 10 ns on a v5e and 3 ns on a v5p, where the
product that would recompute it takes 4 k n operations, 42 ns and 18 ns at their peaks. The kept
4 n bytes per row beside the rows equal those of the `xla` implementation; a model that cannot hold
them recomputes its layers. h is recomputed from z in the kernel that reads z anyway.

A W_out that lies in memory as [G k n] (`down_is_turned`) is read so, and its gradient written so:
the TPU gathers the last dimension of an array into another order than it is read in, and would copy
all matrices of a layer, 0.94 GB of Mixtral 8x7B, before each of its three products.

W_in may come in two arrays [G k n], gate and up, which are read where they lie, and get their
gradients as two: where they are gathered, and their gradients reduced, buffers are half as large.

W_in that comes as [G k 2 n] is taken as [G 2 k n]: separate halves have their own tiles. XLA makes
that copy together with the cast from the dtype of parameters. Rows are neither gathered nor
combined here, for the reasons in grouped_matmul/tpu/kernels.py.

Quantised matrices are taken as in `grouped_matmul`, and have no gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.tpu.contract import contract_parts
from pallas_kernels.grouped_matmul.tpu.factors import factors_of
from pallas_kernels.grouped_matmul.tpu.multiply import multiply_and
from pallas_kernels.quantized_array import QuantizedArray

Halves = tuple[Float[Array, "G k n"], Float[Array, "G k n"]]


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray | Halves,
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    down_is_turned: bool = False,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    if isinstance(down, QuantizedArray) or not down_is_turned:
        return _experts(rows, gate_up, down, group_sizes, False)
    return _experts(rows, gate_up, down.swapaxes(1, 2), group_sizes, True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _experts(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray | Halves,
    down: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    is_turned: bool,
) -> Float[Array, "R k"]:
    """Return the result with `down` [G n k], or [G k n] if it is turned."""
    (hidden,) = multiply_and(
        lambda sums, extras: [[_activate(*sums)]],
        factors_of(rows, _apart(gate_up), is_turned=False),
        group_sizes,
        [(1, rows.dtype)],
        name="grouped_swiglu_in",
    )
    return _project(hidden, down, group_sizes, is_turned=is_turned)


def _forward(rows, gate_up, down, group_sizes, is_turned):
    hidden, z = multiply_and(
        lambda sums, extras: [[_activate(*sums)], sums],
        factors_of(rows, _apart(gate_up), is_turned=False),
        group_sizes,
        [(1, rows.dtype), (2, rows.dtype)],
        name="grouped_swiglu_in",
    )
    out = _project(hidden, down, group_sizes, is_turned=is_turned)
    return out, (rows, z, gate_up, down, group_sizes)


def _backward(is_turned, residuals, d_out):
    rows, z, gate_up, down, group_sizes = residuals
    d_z, hidden = multiply_and(
        lambda sums, extras: _gradients(sums[0], *extras[0].astype(jnp.float32)),
        factors_of(d_out, _stack(down), is_turned=not is_turned),
        group_sizes,
        [(2, rows.dtype), (1, rows.dtype)],
        extras=[z],
        is_turned=not is_turned,
        name="grouped_swiglu_d_hidden",
    )
    (d_rows,) = multiply_and(
        lambda sums, extras: [sums],
        factors_of(d_z, _apart(gate_up), is_turned=True),
        group_sizes,
        [(1, rows.dtype)],
        is_turned=True,
        name="grouped_swiglu_d_rows",
    )
    d_gate_up = d_down = None
    contract = functools.partial(
        contract_parts, rows, d_z, group_sizes, out_dtype=rows.dtype, name="grouped_swiglu_d_in"
    )
    if isinstance(gate_up, tuple):
        d_gate_up = tuple(contract(part=part)[:, 0] for part in range(2))
    elif not isinstance(gate_up, QuantizedArray):
        d_gate_up = contract().swapaxes(1, 2)
    if not isinstance(down, QuantizedArray):
        first, second = (d_out, hidden) if is_turned else (hidden[0], d_out[None])
        d_down = contract_parts(
            first, second, group_sizes, out_dtype=down.dtype, name="grouped_swiglu_d_out"
        )[:, 0]
    return d_rows[0], d_gate_up, d_down, None


_experts.defvjp(_forward, _backward)


def _activate(gate: Array, up: Array) -> Array:
    return gate * jax.nn.sigmoid(gate) * up


def _gradients(d_hidden: Array, gate: Array, up: Array) -> tuple[list[Array], list[Array]]:
    """Return the gradients of both halves of z, and h."""
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1.0 - sigmoid))
    return [d_gate, d_hidden * silu], [silu * up]


def _project(
    hidden: Float[Array, "1 R n"],
    down: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
) -> Float[Array, "R k"]:
    (out,) = multiply_and(
        lambda sums, extras: [sums],
        factors_of(hidden, _stack(down), is_turned=is_turned),
        group_sizes,
        [(1, hidden.dtype)],
        is_turned=is_turned,
        name="grouped_swiglu_out",
    )
    return out[0]


def _stack(weights: Array | QuantizedArray) -> Array | QuantizedArray:
    """Return [G ...] as one part, [G 1 ...]."""
    return jax.tree.map(lambda leaf: leaf[:, None], weights)


def _apart(
    gate_up: Array | QuantizedArray | Halves,
) -> Array | QuantizedArray | tuple[Array, Array]:
    """Return [G k 2 n] as two parts, [G 2 k n]; halves as one part each, [G 1 k n]."""
    if isinstance(gate_up, tuple):
        return gate_up[0][:, None], gate_up[1][:, None]
    parts = jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), gate_up)
    if isinstance(parts, QuantizedArray) and parts.axis is not None:
        parts = dataclasses.replace(parts, axis=-2)
    return parts
