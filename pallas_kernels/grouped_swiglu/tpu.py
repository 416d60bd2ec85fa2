# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Implements grouped_swiglu for TPUs: five calls of the kernels of grouped_matmul.

    forward     z = [a | b] = rows @ W_in, h = silu(a) * b             one kernel; out = h @ W_out
    backward    dz, h from (d out @ W_out^T) and z                     one kernel
                d rows = dz @ W_in^T, both halves in one sum; dW_in = rows^T dz, dW_out = h^T d out

Factors of rows multiply h in the kernels. dz leaves its kernel without them: d factors is the sum
of db * b over a row (db = dh * silu(a)), and XLA reads dz once for it and the factors.

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

With `indices` the first and the third kernel, and those of the gradients of both matrices, read
tokens, and the gradients of their sums, by index (grouped_matmul/tpu/gather.py). The rows of `out`
and `d rows` are written, and XLA sums those of a token.

W_in that comes as [G k 2 n] is taken as [G 2 k n]: separate halves have their own tiles. XLA makes
that copy together with the cast from the dtype of parameters. Rows are not combined here, for the
reason in grouped_matmul/tpu/kernels.py.

Quantised matrices are taken as in `grouped_matmul`, and have no gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.grouped_matmul.tpu.contract import contract_parts
from pallas_kernels.grouped_matmul.tpu.factors import factors_of
from pallas_kernels.grouped_matmul.tpu.gather import takes_rows
from pallas_kernels.grouped_matmul.tpu.multiply import multiply_and
from pallas_kernels.grouped_swiglu.rows import HIDDEN, RowIndices
from pallas_kernels.quantized_array import QuantizedArray

Halves = tuple[Float[Array, "G k n"], Float[Array, "G k n"]]


def grouped_swiglu(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray | Halves,
    down: Float[Array, "G n k"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    row_factors: Float[Array, " A"] | None = None,
    *,
    down_is_turned: bool = False,
    indices: RowIndices | None = None,
) -> Float[Array, "R k"]:
    """Return what `pallas_kernels.grouped_swiglu` returns."""
    if indices is not None and not takes_rows(rows):
        arrays = (indices.rows_of(rows), gate_up, down, group_sizes, row_factors)
        return indices.sums_of(grouped_swiglu(*arrays, down_is_turned=down_is_turned))
    factors = None if row_factors is None else row_factors[None, :, None]
    if isinstance(down, QuantizedArray) or not down_is_turned:
        return _experts(rows, gate_up, down, group_sizes, factors, indices, False)
    return _experts(rows, gate_up, down.swapaxes(1, 2), group_sizes, factors, indices, True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _experts(
    rows: Float[Array, "R k"],
    gate_up: Float[Array, "G k 2 n"] | QuantizedArray | Halves,
    down: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    factors: Float[Array, "1 A 1"] | None,
    indices: RowIndices | None,
    is_turned: bool,
) -> Float[Array, "R k"]:
    """Return the result with `down` [G n k], or [G k n] if it is turned."""
    (hidden,) = multiply_and(
        lambda sums, extras: [[_activate(sums, extras)]],
        factors_of(rows, _apart(gate_up), is_turned=False),
        group_sizes,
        [(1, rows.dtype)],
        extras=_some(factors),
        sources=_sources(indices),
        name="grouped_swiglu_in",
    )
    return _project(hidden, down, group_sizes, indices, is_turned=is_turned)


def _forward(rows, gate_up, down, group_sizes, factors, indices, is_turned):
    hidden, z = multiply_and(
        lambda sums, extras: [[_activate(sums, extras)], sums],
        factors_of(rows, _apart(gate_up), is_turned=False),
        group_sizes,
        [(1, rows.dtype), (2, rows.dtype)],
        extras=_some(factors),
        sources=_sources(indices),
        name="grouped_swiglu_in",
    )
    out = _project(hidden, down, group_sizes, indices, is_turned=is_turned)
    return out, (rows, checkpoint_name(z, HIDDEN), gate_up, down, group_sizes, factors, indices)


def _backward(is_turned, residuals, d_out):
    rows, z, gate_up, down, group_sizes, factors, indices = residuals
    sources = _sources(indices)
    d_z, hidden = multiply_and(
        lambda sums, extras: _gradients(sums[0], extras[0], extras[1:]),
        factors_of(d_out, _stack(down), is_turned=not is_turned),
        group_sizes,
        [(2, rows.dtype), (1, rows.dtype)],
        extras=[z, *_some(factors)],
        is_turned=not is_turned,
        sources=sources,
        name="grouped_swiglu_d_hidden",
    )
    d_factors = None
    if factors is not None:
        d_factors = jnp.sum(
            d_z[1:].astype(jnp.float32) * z[1:].astype(jnp.float32), 2, keepdims=True
        )
        d_z = (d_z.astype(jnp.float32) * factors).astype(rows.dtype)
    (d_rows,) = multiply_and(
        lambda sums, extras: [sums],
        factors_of(d_z, _apart(gate_up), is_turned=True),
        group_sizes,
        [(1, rows.dtype)],
        is_turned=True,
        name="grouped_swiglu_d_rows",
    )
    d_rows = d_rows[0] if indices is None else indices.sums_of(d_rows[0])
    d_gate_up = d_down = None
    contract = functools.partial(
        contract_parts,
        rows,
        d_z,
        group_sizes,
        out_dtype=rows.dtype,
        sources=sources,
        name="grouped_swiglu_d_in",
    )
    if isinstance(gate_up, tuple):
        d_gate_up = tuple(contract(part=part)[:, 0] for part in range(2))
    elif not isinstance(gate_up, QuantizedArray):
        d_gate_up = contract().swapaxes(1, 2)
    if not isinstance(down, QuantizedArray):
        first, second = (d_out, hidden) if is_turned else (hidden[0], d_out[None])
        d_down = contract_parts(
            first,
            second,
            group_sizes,
            out_dtype=down.dtype,
            sources=sources,
            gathers_others=not is_turned,
            name="grouped_swiglu_d_out",
        )[:, 0]
    return d_rows, d_gate_up, d_down, None, d_factors, None


_experts.defvjp(_forward, _backward)


def _some(factors: Array | None) -> list[Array]:
    return [] if factors is None else [factors]


def _sources(indices: RowIndices | None) -> Array | None:
    return None if indices is None else indices.sources


def _activate(z: list[Array], factors: list[Array]) -> Array:
    """Return the hidden units, times the factors [1 r 1] if there are any."""
    gate, up = z
    hidden = gate * jax.nn.sigmoid(gate) * up
    return hidden * factors[0][0] if factors else hidden


def _gradients(d_hidden: Array, z: Array, factors: list[Array]) -> tuple[list[Array], list[Array]]:
    """Return the gradients of both halves of z, without factors, and h, with them."""
    gate, up = z.astype(jnp.float32)
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_hidden * up * (sigmoid + silu * (1.0 - sigmoid))
    hidden = silu * up
    return [d_gate, d_hidden * silu], [hidden * factors[0][0] if factors else hidden]


def _project(
    hidden: Float[Array, "1 A n"],
    down: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    indices: RowIndices | None,
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
    return out[0] if indices is None else indices.sums_of(out[0])


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
