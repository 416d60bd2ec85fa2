# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits whose activations have 4 bits too, but for a few blocks: `quantize_mixed`.

    out = sum over blocks b of Q(x[:, order])_b @ (4-bit w[order])_b      Q to 8 bits for the first
                                                                          `num_wide` blocks, else 4

COMET's FMPQ (arXiv 2410.12168, section 4). In the activations of language models a few channels are
far larger than others, and in 4 bits they leave nothing of what shares a scale with them. So the
channels are put in the order of their largest value in a sample of activations; the outliers then
stand together in few blocks, which keep 8 bits, and the others have neighbours of their own size.
The sum does not know the order of its terms: without rounding the result is that of `x @ w`.

The paper does not say how many blocks are wide. Here it is as few as keep the error on the sample
within `tolerance` of what 8 bits everywhere would give, which is measured for every number.

It says how numbers are stored and rounded. Multiplying them is `quantized_matmul`'s; an inner
permutation of the layer before may be folded into its weights, which is not done here.
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
    """A matrix [k n] for `quantized_matmul`, and how its other factor is to be rounded. A pytree,
    as a `QuantizedArray` is."""

    weights: QuantizedArray
    """int4, rows in the order of `order`, with scales for each block of rows and each column."""
    order: Int[Array, " k"] | Any
    """Which row of the matrix stands at each place, channels of large activations first."""
    num_wide: int = dataclasses.field(metadata={"static": True})
    """So many of the first blocks meet activations of 8 bits, the others of 4."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self.weights.shape

    @property
    def ndim(self) -> int:
        """Of the matrix."""
        return self.weights.ndim

    @property
    def num_blocks(self) -> int:
        """Of activations, and of rows."""
        return self.weights.num_blocks

    @property
    def num_wide_channels(self) -> int:
        """Of the activations in order, so many of the first have 8 bits."""
        return self.num_wide * (self.shape[-2] // self.num_blocks)


def quantize_mixed(
    weights: Float[Array, "k n"],
    sample: Float[Array, "T k"],
    *,
    block_size: int = BLOCK_SIZE,
    tolerance: float = 1.05,
    num_wide: int | None = None,
) -> MixedArray:
    """Rounds a matrix to 4 bits, and settles which of its activations need 8.

    Args:
        weights: The matrix; the first axis is summed over.
        sample: Activations as they come, some hundred rows or more.
        block_size: Channels that share a scale; divides k.
        tolerance: Error on the sample, relative to that of activations of 8 bits everywhere.
        num_wide: So many blocks of 8 bits instead, whatever the error; then it may be traced.

    Returns:
        The matrix in its new order.

    Raises:
        ValueError: Shapes that do not fit, a number of blocks that is not there, or traced arrays
            without `num_wide`.
    """
    _check(weights, sample, block_size, tolerance, num_wide)
    weights, sample = (x.astype(jnp.float32) for x in (weights, sample))
    order = jnp.argsort(-jnp.max(jnp.abs(sample), axis=0)).astype(jnp.int32)
    rounded = quantize(weights[order], "int4", axis=-2, block_size=block_size)
    if num_wide is None:
        errors = _errors(weights[order], sample[:, order], rounded)
        is_enough = errors <= tolerance * errors[-1]
        num_wide = int(jnp.argmax(is_enough))
    return MixedArray(weights=rounded, order=order, num_wide=num_wide)


def round_activations(x: Float[Array, "m k"], w: MixedArray) -> QuantizedArray:
    """The other factor in the order of w, in few bits: int8, of which the blocks after `num_wide`
    hold no more than int4 does, with a scale for each row and block.

    Args:
        x: Floating rows.
        w: The matrix that it will meet.
    """
    x = x[:, w.order]
    cut, block_size = w.num_wide_channels, w.shape[-2] // w.num_blocks
    parts = [_round(x[:, :cut], "int8", block_size)] if cut else []
    if cut < x.shape[1]:
        parts.append(_round(x[:, cut:], "int4", block_size))
    return QuantizedArray(
        values=jnp.concatenate([part.values.astype(jnp.int8) for part in parts], axis=1),
        scales=jnp.concatenate([part.scales for part in parts], axis=1),
        axis=-1,
    )


def dequantize_mixed(w: MixedArray, dtype: Any = jnp.float32) -> Float[Array, "k n"]:
    """The numbers that the matrix stands for, in their first order.

    Args:
        w: As from `quantize_mixed`.
        dtype: Of the result.
    """
    return dequantize(w.weights, dtype)[jnp.argsort(w.order)]


def _round(x: Array, dtype: QuantizedDtype, block_size: int) -> QuantizedArray:
    return quantize(x, dtype, axis=-1, block_size=block_size)


@jax.jit
def _errors(
    weights: Float[Array, "k n"], sample: Float[Array, "T k"], rounded: QuantizedArray
) -> Float[Array, " blocks_and_1"]:
    """The error of the product where the first 0, 1, 2, ... blocks are wide."""
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
