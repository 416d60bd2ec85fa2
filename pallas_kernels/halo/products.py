# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multiplies activations and a weight that are both in few bits, forward and backward (HALO).

With H orthonormal, Q one scale for a whole tensor, e the gradient of y:

    level 0   y = Q(x) Q(W)            dx = Q(e) Q(W)^T                     dW = Q(x)^T Q(e)
    level 1   y = Q(x H) Q(H^T W)      dx = Q(e) Q(H^T W)^T H^T             dW = H Q(x H)^T Q(e)
    level 2   as level 1, but          dx = T^T (Q(T e) Q(H^T W)^T) H^T     T rotates tokens

(HALO, arXiv 2501.02625, section 4; IST-DASLab/HALO.) Without Q all three are x W and its gradients.
The backward pass multiplies the codes of the forward pass: one byte per value of activations is
kept. One large feature would take most steps of a scale, and one token with a large gradient those
of dx: H and T spread them. 8-bit integers need level 2; float8, whose steps are relative, 0 or 1.

`Halo.block` bounds the values that are rotated together. The paper rotates whole rows and whole
batches; blocks of 128 cost a constant number of operations per value, and are the same on every
mesh whose shards they divide. In a manual region a scale is that of the tensor on all devices, for
which they agree on one number per tensor.

Rows sorted by group are multiplied with their own group's matrix, so that a rotation over tokens
would mix groups: levels 1 and 2 are the same there. Each matrix of a stack has its own scale.

To add a level: its three products in `pallas_kernels/halo/products.py` and
`pallas_kernels/halo/reference.py`, a row in `tests/pallas_kernels/halo/test_halo.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float, Int
from pallas_kernels.backend import Implementation
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.halo.hadamard import hadamard, rotated_together
from pallas_kernels.halo.weights import EncodedWeight, Halo
from pallas_kernels.jax_versions import match_varying, varying_axes
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_matmul import quantized_matmul

Codes = QuantizedArray | Array


def project(
    x: Float[Array, ...],
    weight: EncodedWeight,
    halo: Halo,
    *,
    dtype: Any = None,
    implementation: Implementation | None = None,
) -> Float[Array, ...]:
    """Return a dense product, whose gradients are products in few bits too.

    Args:
        x: [*tokens, contracted dimensions], the latter as in the weight.
        weight: Encoded matrix.
        halo: Format with which the weight was encoded.
        dtype: Dtype of the result; None takes that of x.
        implementation: Implementation of `quantized_matmul`.

    Returns:
        [*tokens, *outputs].
    """

    products = _HaloProducts(
        forward=partial(_dense, implementation=implementation),
        into_activations=partial(_into_tokens, halo=halo, implementation=implementation),
        into_weight=partial(_dense, implementation=implementation),
    )
    num_batch_dims = x.ndim - weight.contracted
    width = weight.carrier.shape[0]
    rows = x.reshape(math.prod(x.shape[:num_batch_dims]), width)
    y = _multiply(rows, weight, None, halo, dtype or x.dtype, products)
    return y.reshape(*x.shape[:num_batch_dims], *weight.outputs)


def project_groups(
    rows: Float[Array, "R k"],
    weights: EncodedWeight,
    group_sizes: Int[Array, " G"],
    halo: Halo,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "R ..."]:
    """Return each group of consecutive rows times its own matrix.

    Args:
        rows: Rows sorted by group; rows past the last group are not read.
        weights: Encoded stack of G matrices.
        group_sizes: Rows of each group.
        halo: Format with which the weights were encoded.
        implementation: Implementation of `grouped_matmul` and `grouped_outer`.

    Returns:
        [R, *outputs]; 0 past the last group.
    """
    products = _HaloProducts(
        forward=partial(_by_group, implementation=implementation),
        into_activations=partial(_into_rows, halo=halo, implementation=implementation),
        into_weight=partial(_outer_by_group, implementation=implementation),
    )
    sizes = group_sizes.astype(jnp.int32)
    y = _multiply(rows, weights, sizes, halo, rows.dtype, products)
    return y.reshape(rows.shape[0], *weights.outputs)


@dataclasses.dataclass(frozen=True, slots=True)
class _HaloProducts:
    """The three products; each also takes the group sizes, or None."""

    forward: Callable[..., Array]
    """(codes of x, codes of W, sizes, dtype of the result)."""
    into_activations: Callable[..., Array]
    """(e in float32, codes of W, sizes), in float32."""
    into_weight: Callable[..., Array]
    """(codes of x, transposed without groups, codes of e, sizes, dtype of the result)."""


def _multiply(
    x: Array,
    weight: EncodedWeight,
    sizes: Array | None,
    halo: Halo,
    dtype: Any,
    products: _HaloProducts,
) -> Array:
    """Return x times the weight; its gradients are the other two products."""
    block = weight.block
    dtypes = (x.dtype, weight.carrier.dtype)

    def forward(
        x: Array, codes: Codes, carrier: Array, sizes: Array | None
    ) -> tuple[Array, tuple[Codes, Codes, Array | None]]:
        del carrier
        rotated = hadamard(_within(x.astype(jnp.float32), sizes), axis=-1, block=block)
        x_codes = _quantize(rotated, halo)
        return products.forward(x_codes, codes, sizes, out_dtype=dtype), (x_codes, codes, sizes)

    @jax.custom_vjp
    def multiply(x: Array, codes: Codes, carrier: Array, sizes: Array | None) -> Array:
        return forward(x, codes, carrier, sizes)[0]

    def backward(
        residuals: tuple[Codes, Codes, Array | None], e: Array
    ) -> tuple[Array, None, Array, None]:
        x_codes, codes, sizes = residuals
        e = _within(e.astype(jnp.float32), sizes)
        d_x = products.into_activations(e, codes, sizes)
        d_x = hadamard(d_x, axis=-1, block=block, is_inverse=True).astype(dtypes[0])
        operand = x_codes if sizes is not None else _turn(x_codes)
        d_weight = products.into_weight(operand, _quantize(e, halo), sizes, out_dtype=dtypes[1])
        return d_x, None, d_weight, None

    multiply.defvjp(forward, backward)
    operands = (x, weight.codes, weight.carrier, sizes)
    return multiply(*match_varying(operands, operands))


def _dense(
    x: Codes, w: Codes, sizes: None, *, out_dtype: Any, implementation: Implementation | None
) -> Array:
    del sizes
    return quantized_matmul(x, w, implementation=implementation, out_dtype=out_dtype)


def _into_tokens(
    e: Array, codes: Codes, sizes: None, *, halo: Halo, implementation: Implementation | None
) -> Array:
    block = rotated_together(e.shape[0], halo.block) if halo.level == 2 else 1
    rotated = _quantize(hadamard(e, axis=0, block=block), halo)
    product = _dense(
        rotated, _turn(codes), sizes, out_dtype=jnp.float32, implementation=implementation
    )
    return hadamard(product, axis=0, block=block, is_inverse=True)


def _by_group(
    x: Codes, w: Codes, sizes: Array, *, out_dtype: Any, implementation: Implementation | None
) -> Array:
    return grouped_matmul(x, w, sizes, implementation=implementation, out_dtype=out_dtype)


def _outer_by_group(
    x: Codes, y: Codes, sizes: Array, *, out_dtype: Any, implementation: Implementation | None
) -> Array:
    return grouped_outer(x, y, sizes, implementation=implementation, out_dtype=out_dtype)


def _into_rows(
    e: Array, codes: Codes, sizes: Array, *, halo: Halo, implementation: Implementation | None
) -> Array:
    codes_e = _quantize(e, halo)
    dtype = jnp.float32
    return _by_group(codes_e, _turn(codes), sizes, out_dtype=dtype, implementation=implementation)


def _within(x: Array, sizes: Array | None) -> Array:
    """Zero rows past the last group, which must not affect a scale."""
    if sizes is None:
        return x
    is_own = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32)
    return jnp.where(is_own[:, None], x, jnp.zeros_like(x))


def _quantize(x: Array, halo: Halo) -> Codes:
    """Return codes with one scale for all devices."""
    return halo.quantize(x, varying_axes(x))


def _turn(codes: Codes) -> Codes:
    return jax.tree.map(lambda part: jnp.swapaxes(part, -1, -2), codes)
