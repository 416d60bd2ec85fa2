# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares the two factors for the GPU kernels of grouped_matmul: values, and scales per block.

    rows         weights      read as
    floating     floating     unchanged
    floating     8, 4 bits    unchanged, widened by the kernel; scales of the weights
    8, 4 bits    8, 4 bits    8 bits of one kind; scales of both

int4 is then read as int8, and two kinds of float8, or mxfp8, as bfloat16: all of it exact. A block
ends where it does in either factor, so that scales enter after the sum of a block:

    out[r, n] = sum over blocks b of row_scales[r, b] weight_scales[g, b, n] sum over k in b of ...

For transposed weights, scales along the sum cannot enter after it: such weights become floating
before (`without_scales`).
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array
from pallas_kernels.quantized_array import QuantizedArray, constant


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """Arrays that a kernel reads."""

    rows: Array
    weights: Array
    """[G k n], or a second factor [R n]."""
    row_scales: Array | None = None
    """[R blocks] float32; [1 1] for a product with one scale."""
    weight_scales: Array | None = None
    """[G blocks n] float32; [1 1] for a product with one scale."""

    @property
    def blocks(self) -> int:
        """Number of blocks of the sum; 0 without scales."""
        return 0 if self.row_scales is None else self.row_scales.shape[1]

    @property
    def block_size(self) -> int:
        """Length of a block of the sum."""
        return self.rows.shape[1] // self.blocks

    def widen(self) -> "Operands":
        """Return both factors in bfloat16, which holds 8-bit values exactly."""
        rows, weights = (x.astype(jnp.bfloat16) for x in (self.rows, self.weights))
        return dataclasses.replace(self, rows=rows, weights=weights)

    def scaled_product(self, out: Array, group_sizes: Array) -> Array:
        """Return a contraction [G k n] of two factors of one scale each, scaled."""
        assert self.row_scales is not None and self.weight_scales is not None
        scale = (self.row_scales * self.weight_scales).reshape(())
        # An empty group is 0, whatever the scale.
        return jnp.where(group_sizes[:, None, None] > 0, out * scale, 0.0)


def operands_of(rows: Any, weights: Any, *, is_turned: bool) -> Operands:
    """Return the two factors of either product, in the fewest bits that a kernel reads.

    Args:
        rows: [R k], or quantised.
        weights: [G k n], [R n], or quantised.
        is_turned: Whether weights are transposed.
    """
    if not isinstance(weights, QuantizedArray):
        return Operands(rows=rows, weights=weights)
    has_scales_inside = is_turned and weights.axis is not None
    if has_scales_inside or any(_is_micro(x) for x in (rows, weights)):
        return without_scales(rows, weights)
    row_values = _values(rows) if isinstance(rows, QuantizedArray) else rows
    weight_values = _values(weights) if isinstance(rows, QuantizedArray) else weights.values
    if isinstance(rows, QuantizedArray) and row_values.dtype != weight_values.dtype:
        row_values = row_values.astype(jnp.bfloat16)
        weight_values = weight_values.astype(jnp.bfloat16)
    if weights.ndim == 2:
        scale = weights.scales.astype(jnp.float32)
        return Operands(
            rows=row_values, weights=weight_values, row_scales=_scales_of(rows), weight_scales=scale
        )
    groups, _, width = weights.shape
    if is_turned:
        width = weights.shape[1]
    parts = _num_blocks(rows), weights.num_blocks
    blocks = math.lcm(*parts)
    row_scales = jnp.broadcast_to(_scales_of(rows), (rows.shape[0], parts[0]))
    weight_scales = weights.scales.astype(jnp.float32)
    weight_scales = jnp.broadcast_to(weight_scales, (groups, parts[1], width))
    return Operands(
        rows=row_values,
        weights=weight_values,
        row_scales=jnp.repeat(row_scales, blocks // parts[0], axis=1),
        weight_scales=jnp.repeat(weight_scales, blocks // parts[1], axis=1),
    )


def without_scales(rows: Any, weights: Any) -> Operands:
    """Return both factors as floating arrays.

    The dtype is that of the rows, bfloat16 where that is exact, else float32.
    """
    if not isinstance(rows, QuantizedArray):
        return Operands(rows=rows, weights=constant(weights).astype(rows.dtype))
    is_exact = all(_is_micro(x) for x in (rows, weights))
    dtype = jnp.bfloat16 if is_exact else jnp.float32
    return Operands(rows=constant(rows).astype(dtype), weights=constant(weights).astype(dtype))


def _is_micro(x: Any) -> bool:
    """Return whether this is mxfp8: its scales are powers of two, its values fit bfloat16."""
    return isinstance(x, QuantizedArray) and x.scales.dtype == jnp.float8_e8m0fnu


def _values(x: QuantizedArray) -> Array:
    return x.values.astype(jnp.int8) if x.values.dtype == jnp.int4 else x.values


def _num_blocks(x: Any) -> int:
    return x.num_blocks if isinstance(x, QuantizedArray) else 1


def _scales_of(rows: Any) -> Array:
    if isinstance(rows, QuantizedArray):
        return rows.scales.astype(jnp.float32)
    return jnp.ones((1, 1), jnp.float32)
