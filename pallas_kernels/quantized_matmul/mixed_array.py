# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds weights to 4 bits, with activations of 4 bits except for a few blocks: `quantize_mixed`.

    out = sum over blocks b of Q(x[:, order])_b @ (4-bit w[order])_b      Q to 8 bits for the first
                                                                          `num_wide` blocks, else 4

COMET's FMPQ (arXiv 2410.12168, section 4). In the activations of language models a few channels are
far larger than others; in 4 bits the values that share a scale with them would be lost. Channels
are therefore sorted by their largest value in a sample of activations: the outliers fill a few
blocks, which keep 8 bits, and the others have neighbours of their own size. Sorting does not change
the sum: without rounding the result is that of `x @ w`.

The paper does not say how many blocks are wide. Here it is the smallest number that keeps the error
on the sample within `tolerance` of the error of 8 bits everywhere, measured for every number.

This module stores and rounds; `quantized_matmul` multiplies, and `grouped_matmul` a stack of
matrices, each with its own order. Folding the permutation into the weights of the layer before is
not done here.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.quantized_array import (
    QuantizedArray,
    QuantizedDtype,
    dequantize,
    quantize,
)

BLOCK_SIZE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MixedArray:
    """Matrix [k n] for `quantized_matmul`, with the rounding of its other factor.

    A pytree, like `QuantizedArray`. Of a stack [G k n] all matrices have as many wide blocks.
    """

    weights: QuantizedArray
    """int4, rows sorted by `order`, with a scale per block of rows and column."""
    order: Int[Array, "*G k"] | Any
    """Row of the matrix at each place, channels of large activations first."""
    num_wide: int = dataclasses.field(metadata={"static": True})
    """Number of leading blocks that meet activations of 8 bits; the others meet 4."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return self.weights.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the matrix."""
        return self.weights.ndim

    @property
    def num_blocks(self) -> int:
        """Number of blocks of activations, and of rows."""
        return self.weights.num_blocks

    @property
    def num_wide_channels(self) -> int:
        """Number of leading channels, in order, whose activations have 8 bits."""
        return self.num_wide * (self.shape[-2] // self.num_blocks)


def quantize_mixed(
    weights: Float[Array, "k n"],
    sample: Float[Array, "T k"],
    *,
    block_size: int = BLOCK_SIZE,
    tolerance: float = 1.05,
    num_wide: int | None = None,
) -> MixedArray:
    """Round a matrix to 4 bits, and choose which of its activations need 8.

    Args:
        weights: Matrix; the first axis is summed over.
        sample: Sample of activations, some hundred rows or more.
        block_size: Channels that share a scale; divides k.
        tolerance: Error on the sample, relative to that of 8-bit activations everywhere.
        num_wide: Fixed number of 8-bit blocks, whatever the error; allows tracing.

    Returns:
        The matrix in its new order.

    Raises:
        ValueError: Shapes do not fit, the number of blocks is out of range, or arrays are traced
            without `num_wide`.
    """
    _check(weights, sample, block_size, tolerance, num_wide)
    weights, sample = (x.astype(jnp.float32) for x in (weights, sample))
    order = channel_order(jnp.max(jnp.abs(sample), axis=0))
    rounded = quantize(weights[order], "int4", axis=-2, block_size=block_size)
    if num_wide is None:
        errors = _errors(weights[order], sample[:, order], rounded)
        is_enough = errors <= tolerance * errors[-1]
        num_wide = int(jnp.argmax(is_enough))
    return MixedArray(weights=rounded, order=order, num_wide=num_wide)


def channel_order(largest: Float[Array, "*G k"]) -> Int[Array, "*G k"]:
    """Return the channels by their largest value, descending; equal ones stay in order.

    Args:
        largest: Largest |activation| of each channel.
    """
    return jnp.argsort(-largest, axis=-1, stable=True).astype(jnp.int32)


def round_activations(x: Float[Array, "m k"], w: MixedArray) -> QuantizedArray:
    """Return the other factor in the order of w, in few bits.

    The result is int8 with a scale per row and block; blocks after `num_wide` hold values of int4.

    Args:
        x: Floating rows.
        w: Matrix that it will be multiplied with.
    """
    return _round_sorted(x[:, w.order], w)


def round_group_activations(
    rows: Float[Array, "R k"], w: MixedArray, group_sizes: Int[Array, " G"]
) -> QuantizedArray:
    """Return rows sorted by group, each in the order of its group's matrix, in few bits.

    Args:
        rows: Floating rows; those past the last group are rounded in any order.
        w: Stack [G k n] of matrices that they will be multiplied with.
        group_sizes: Number of rows of each group.
    """
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    group_ids = jnp.searchsorted(ends, jnp.arange(rows.shape[0]), side="right")
    order = w.order[jnp.minimum(group_ids, w.shape[0] - 1)]
    return _round_sorted(jnp.take_along_axis(rows, order, axis=1), w)


def _round_sorted(x: Float[Array, "m k"], w: MixedArray) -> QuantizedArray:
    """Return sorted channels in 8 bits as far as blocks are wide, the others in 4."""
    cut = w.num_wide_channels
    block_size = w.shape[-2] // w.num_blocks
    parts = [_round(x[:, :cut], "int8", block_size)] if cut else []
    if cut < x.shape[1]:
        parts.append(_round(x[:, cut:], "int4", block_size))
    return QuantizedArray(
        values=jnp.concatenate([part.values.astype(jnp.int8) for part in parts], axis=1),
        scales=jnp.concatenate([part.scales for part in parts], axis=1),
        axis=-1,
    )


def dequantize_mixed(w: MixedArray, dtype: Any = jnp.float32) -> Float[Array, "k n"]:
    """Return the values that the matrix represents, in their first order.

    Args:
        w: Result of `quantize_mixed`.
        dtype: Dtype of the result.
    """
    return dequantize(w.weights, dtype)[jnp.argsort(w.order)]


def _round(x: Array, dtype: QuantizedDtype, block_size: int) -> QuantizedArray:
    return quantize(x, dtype, axis=-1, block_size=block_size)


@jax.jit
def _errors(
    weights: Float[Array, "k n"], sample: Float[Array, "T k"], rounded: QuantizedArray
) -> Float[Array, " blocks_and_1"]:
    """Return the error of the product where the first 0, 1, 2, ... blocks are wide."""
    blocks = rounded.num_blocks
    size = sample.shape[1] // blocks
    numbers = dequantize(rounded)
    wide = dequantize(_round(sample, "int8", size))
    narrow = dequantize(_round(sample, "int4", size))

    def by_block(x: Array, axis: int) -> Array:
        return jnp.stack(jnp.split(x, blocks, axis=axis))

    def narrower(error: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
        change, matrix = block
        error = error + change @ matrix
        return error, jnp.linalg.norm(error)

    error = wide @ numbers - sample @ weights
    changes = (by_block(narrow - wide, 1), by_block(numbers, 0))
    _, norms = jax.lax.scan(narrower, error, changes, reverse=True)
    return jnp.append(norms, jnp.linalg.norm(error))


def _check(
    weights: Array, sample: Array, block_size: int, tolerance: float, num_wide: int | None
) -> None:
    if (weights.ndim, sample.ndim) != (2, 2) or weights.shape[0] != sample.shape[1]:
        raise ValueError(
            f"quantize_mixed takes weights [k n] and sample [T k], not {weights.shape} and "
            f"{sample.shape}."
        )
    if 0 in (*weights.shape, *sample.shape):
        raise ValueError(
            f"quantize_mixed: weights {weights.shape} and sample {sample.shape} must hold numbers."
        )
    if num_wide is None and any(isinstance(x, Tracer) for x in (weights, sample)):
        raise ValueError(
            "quantize_mixed measures how many blocks need 8 bits, which a traced program cannot "
            "wait for: call it outside jax.jit, or give num_wide."
        )
    if tolerance < 1.0:
        raise ValueError(f"quantize_mixed: tolerance={tolerance} must be at least 1.")
    blocks = weights.shape[0] // block_size if block_size > 0 else 0
    if num_wide is not None and not 0 <= num_wide <= blocks:
        raise ValueError(
            f"quantize_mixed: num_wide={num_wide} must be between 0 and the {blocks} blocks of "
            f"{block_size} in {weights.shape[0]} channels."
        )
