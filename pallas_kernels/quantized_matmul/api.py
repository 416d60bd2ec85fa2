# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multiplies two matrices of which one or both are quantised.

    out = x @ w        each factor as it is, or values * scales (`pallas_kernels.quantize`)

The factors are multiplied as given: an x in bfloat16 stays bfloat16 and meets weights of 8 or 4
bits converted to bfloat16 (W8A16, W4A16); an x quantised by the caller meets them in few bits
(W8A8, W4A8, FP8), with sums in exact integers, or float32. Scales enter afterwards, per block.

Floating factors have a gradient, the same for all implementations except the reference, and the
TPU's, which never unpacks w:

    d x = d out @ w^T        d w = x^T @ d out        quantised factors are constants

A `MixedArray` (`pallas_kernels.quantize_mixed`) determines how a floating x is rounded, per row and
block; the product is then W4A8. The gradient of x ignores that rounding.

Sums of integers are exact while they fit in int32: up to 133144 products of two int8 may share a
scale. Where a scale is NaN, the values that it scales are NaN, and no others.

To add an implementation: `pallas_kernels/quantized_matmul/<name>.py` with the function
(x, w, out_dtype), its line in `MULTIPLY` of `pallas_kernels/quantized_matmul/api.py` (in
`OPERATION` if it has its own gradient; in `MULTIPLY_MIXED` for a kernel for mixed blocks), a row in
`tests/pallas_kernels/quantized_matmul/test_quantized_matmul.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.backend import Implementation, Operation
from pallas_kernels.deferred import DeferredProduct
from pallas_kernels.jax_versions import match_varying
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_factors import check_factors
from pallas_kernels.quantized_matmul import reference, xla
from pallas_kernels.quantized_matmul.mixed_array import (
    MixedArray,
    dequantize_mixed,
    round_activations,
)

Multiply = Callable[..., Array]
Quantised = QuantizedArray | MixedArray

_GPU = "pallas_kernels.quantized_matmul.gpu.kernels"
_TPU = "pallas_kernels.quantized_matmul.tpu.kernels"

MULTIPLY: dict[Implementation, Multiply] = {
    "xla": xla.quantized_matmul,
    "pallas_gpu": DeferredProduct(f"{_GPU}:quantized_matmul"),
}
"""The product of every implementation except the reference."""

MULTIPLY_MIXED: dict[Implementation, Multiply] = {
    "pallas_tpu": DeferredProduct(f"{_TPU}:multiply_mixed")
}
"""Products with a MixedArray that differ from the product with its 4-bit weights."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _differentiable(x: Any, w: Any, out_dtype: Any, multiply: Multiply) -> Array:
    return multiply(x, w, out_dtype)


def _forward(x, w, out_dtype, multiply):
    return _differentiable(x, w, out_dtype, multiply), (x, w)


def _backward(out_dtype, multiply, residuals, d_out):
    del out_dtype, multiply
    x, w = residuals
    d_x = d_w = None
    if not isinstance(x, QuantizedArray):
        d_out = d_out.astype(x.dtype)
        matrix = dequantize_mixed(w, x.dtype) if isinstance(w, MixedArray) else w
        d_x = xla.times_transposed(d_out, matrix, x.dtype)
        if not isinstance(w, Quantised):
            d_w = jnp.matmul(x.T, d_out, preferred_element_type=jnp.float32).astype(w.dtype)
    return d_x, d_w


_differentiable.defvjp(_forward, _backward)

OPERATION = Operation(
    name="quantized_matmul",
    implementations={
        # JAX derives the gradients of the reference.
        "reference": reference.quantized_matmul,
        **{
            name: functools.partial(_differentiable, multiply=multiply)
            for name, multiply in MULTIPLY.items()
        },
        # Has its own kernel for the gradient.
        "pallas_tpu": DeferredProduct(f"{_TPU}:quantized_matmul"),
    },
    refusals={"pallas_gpu": DeferredProduct(f"{_GPU}:reason_against_default")},
)


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray,
    w: Float[Array, "k n"] | QuantizedArray | MixedArray,
    *,
    implementation: Implementation | None = None,
    out_dtype: Any = None,
) -> Float[Array, "m n"]:
    """Return the product of two matrices of which one or both are quantised.

    Args:
        x: Left factor; quantised along its last axis (`axis=-1`) or by one scale.
        w: Right factor; quantised along its first axis (`axis=-2`) or by one scale, or a
            MixedArray.
        implementation: Implementation to run; None picks the fastest that runs here.
        out_dtype: Dtype of the result; None takes that of x, float32 where x is quantised.

    Returns:
        The product, summed in int32 or float32.

    Raises:
        ValueError: Shapes, axes or dtypes do not fit, or the implementation cannot run here or
            cannot take them.
    """
    _check(x, w)
    if out_dtype is None:
        out_dtype = jnp.float32 if isinstance(x, QuantizedArray) else x.dtype
    x, w = match_varying((x, w), x, w)
    if 0 in (*x.shape, *w.shape):
        return match_varying(jnp.zeros((x.shape[0], w.shape[1]), out_dtype), x)
    if isinstance(w, MixedArray):
        multiply = _mixed_product(OPERATION.choose(implementation, x, w).implementation)
        return _differentiable(x, w, jnp.dtype(out_dtype), multiply)
    return OPERATION.function(implementation, x, w)(x, w, jnp.dtype(out_dtype))


@functools.cache  # one function per implementation, so that programs are not retraced
def _mixed_product(implementation: Implementation) -> Multiply:
    def multiply(x: Array, w: MixedArray, out_dtype: Any) -> Array:
        rounded = round_activations(x, w)
        if implementation in MULTIPLY_MIXED:
            return MULTIPLY_MIXED[implementation](rounded, w, out_dtype)
        return OPERATION.implementations[implementation](rounded, w.weights, out_dtype)

    return multiply


def _check(x: Any, w: Any) -> None:
    if (x.ndim, w.ndim) != (2, 2) or x.shape[1] != w.shape[0]:
        raise ValueError(f"quantized_matmul takes x [m k] and w [k n], not {x.shape}, {w.shape}.")
    if isinstance(w, MixedArray):
        if isinstance(x, QuantizedArray) or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                "quantized_matmul: a MixedArray rounds x itself, which must be floating, not "
                f"{'quantised' if isinstance(x, QuantizedArray) else x.dtype}."
            )
        w = w.weights
    check_factors("quantized_matmul", {"x": x, "w": w}, (-1, -2))
