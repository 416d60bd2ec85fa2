# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""grouped_matmul on NVIDIA GPUs: which kernels a product gets, and why.

    hopper   Mosaic GPU, with WGMMA and TMA: compute capability 9.0, numbers of 16 and 8 bits
    triton   Triton: compute capability 8.0 and later, also float32

The choice is a pure function of the GPU and of the two factors, made once for each product. None of
the kernels multiplies float64, or by a GPU older than 8.0: such a call is refused.

To add a kind of GPU: a file beside the two, a name in `Kernel`, its line in `choose_kernel`.
"""

import importlib
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import reason_against
from pallas_kernels.grouped_matmul.gpu.operands import operands_of
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.quantized_array import QuantizedArray

Kernel = Literal["hopper", "triton"]


class KernelChoice(NamedTuple):
    """A kernel and the reason why it runs."""

    kernel: Kernel
    reason: str


def choose_kernel(
    capability: tuple[int, int] | None,
    rows: Any,
    weights: Any,
    *,
    block_size: int | None = None,
    is_contraction: bool = False,
) -> KernelChoice:
    """The kernel of one product.

    Args:
        capability: Compute capability of the GPU, (9, 0) for Hopper; None for no NVIDIA GPU.
        rows: Dtype of the first factor.
        weights: Dtype of the second one.
        block_size: What is summed before scales come in; None where it is everything.
        is_contraction: Whether rows are what is summed.

    Raises:
        ValueError: No kernel runs there, or takes such numbers.
    """
    if capability is None or capability < (8, 0):
        have = "none" if capability is None else f"{capability[0]}.{capability[1]}"
        raise ValueError(
            f"grouped_matmul: the kernels of 'pallas_gpu' need compute capability 8.0, and this "
            f"has {have}: choose 'xla'."
        )
    for dtype in (rows, weights):
        if jnp.dtype(dtype).itemsize > 4:
            raise ValueError(
                f"grouped_matmul: no kernel of 'pallas_gpu' multiplies {jnp.dtype(dtype).name}: "
                "cast it to float32, or choose 'xla'."
            )
    words = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] != 9:
        return KernelChoice("triton", f"{words} has no WGMMA, which is of 9.0 alone")
    against = reason_against(rows, weights, block_size, is_contraction=is_contraction)
    if against is None:
        return KernelChoice("hopper", f"{words} has WGMMA and TMA")
    return KernelChoice("triton", against)


def multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
) -> Array:
    """See `pallas_kernels.grouped_matmul.products`."""
    products = _products_for(rows, weights, is_turned=is_turned, is_contraction=False)
    return products.multiply(rows, weights, group_sizes, is_turned=is_turned, out_dtype=out_dtype)


def contract(
    rows: Array | QuantizedArray,
    others: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Array:
    """See `pallas_kernels.grouped_matmul.products`."""
    products = _products_for(rows, others, is_turned=False, is_contraction=True)
    return products.contract(rows, others, group_sizes, out_dtype=out_dtype)


def _products_for(rows: Any, others: Any, *, is_turned: bool, is_contraction: bool) -> Products:
    factors = operands_of(rows, others, is_turned=is_turned)
    choice = choose_kernel(
        device_capability("grouped_matmul"),
        factors.rows.dtype,
        factors.weights.dtype,
        block_size=factors.block_size if factors.blocks > 1 else None,
        is_contraction=is_contraction,
    )
    # Imported where it is used: the GPU's half of Pallas takes a while, and few need it.
    module = f"pallas_kernels.grouped_matmul.gpu.{choice.kernel}"
    return importlib.import_module(module).PRODUCTS


PRODUCTS = Products(multiply=multiply, contract=contract)
