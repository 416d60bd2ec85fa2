# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the GPU kernel of each product of grouped_matmul.

    hopper   Mosaic GPU, with WGMMA and TMA: compute capability 9.0, values of 16 and 8 bits
    triton   Triton: compute capability 8.0 and later, also float32

float64, and GPUs older than compute capability 8.0, are refused.

To add a GPU kernel: `pallas_kernels/grouped_matmul/gpu/<name>.py` with `PRODUCTS`, its condition in
`kernel_for` of `pallas_kernels/grouped_matmul/gpu/kernels.py`, a row in
`tests/pallas_kernels/grouped_matmul/test_grouped_matmul_for_gpu.py`.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Int
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.gpu.choice import (
    KernelChoice,
    choose_kernel,
    reason_against_gpu,
    reason_against_this_gpu,
)
from pallas_kernels.grouped_matmul.gpu.hopper_tiles import reason_against
from pallas_kernels.grouped_matmul.gpu.operands import operands_of
from pallas_kernels.grouped_matmul.products import Products
from pallas_kernels.quantized_array import QuantizedArray


def kernel_for(
    capability: tuple[int, int] | None,
    rows: Any,
    weights: Any,
    *,
    block_size: int | None = None,
    is_contraction: bool = False,
) -> KernelChoice:
    """Return the kernel of one product.

    Args:
        capability: Compute capability, (9, 0) for Hopper; None if the GPU is not an NVIDIA GPU.
        rows: Dtype of the first factor.
        weights: Dtype of the second factor.
        block_size: Length of the sums between scales; None where all of k shares one scale.
        is_contraction: Whether the sum runs over rows.

    Raises:
        ValueError: No kernel runs on this GPU or takes these dtypes.
    """
    against_gpu = reason_against_gpu(capability)
    if capability is None or against_gpu is not None:
        raise ValueError(
            f"grouped_matmul: implementation='pallas_gpu': {against_gpu}: choose 'xla'."
        )
    if (against_dtypes := _reason_against_dtypes(rows, weights)) is not None:
        raise ValueError(f"grouped_matmul: {against_dtypes}: cast it to float32, or choose 'xla'.")
    against = reason_against(rows, weights, block_size, is_contraction=is_contraction)
    return choose_kernel(capability, against)


def reason_against_default(*factors: Any) -> str | None:
    """Return why XLA multiplies two factors by default; None if a kernel does.

    Args:
        *factors: Floating or quantised, of which dtypes count; or nothing, for the device alone.
    """
    against = reason_against_this_gpu()
    dtypes = (factor.dtype for factor in jax.tree.leaves(factors))
    return _reason_against_dtypes(*dtypes) if against is None else against


def _reason_against_dtypes(*dtypes: Any) -> str | None:
    for dtype in dtypes:
        if jnp.dtype(dtype).itemsize > 4:
            return f"no kernel of 'pallas_gpu' multiplies {jnp.dtype(dtype).name}"
    return None


def multiply(
    rows: Array | QuantizedArray,
    weights: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    is_turned: bool,
    out_dtype: Any,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    products = _products_for(rows, weights, is_turned=is_turned, is_contraction=False)
    return products.multiply(rows, weights, group_sizes, is_turned=is_turned, out_dtype=out_dtype)


def contract(
    rows: Array | QuantizedArray,
    other_rows: Array | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    out_dtype: Any,
) -> Array:
    """Return the product defined in `pallas_kernels.grouped_matmul.products`."""
    products = _products_for(rows, other_rows, is_turned=False, is_contraction=True)
    return products.contract(rows, other_rows, group_sizes, out_dtype=out_dtype)


def _products_for(rows: Any, other_rows: Any, *, is_turned: bool, is_contraction: bool) -> Products:
    factors = operands_of(rows, other_rows, is_turned=is_turned)
    choice = kernel_for(
        device_capability("grouped_matmul"),
        factors.rows.dtype,
        factors.weights.dtype,
        block_size=factors.block_size if factors.blocks > 1 else None,
        is_contraction=is_contraction,
    )
    # Imported on use: the GPU half of Pallas is slow to import.
    module = f"pallas_kernels.grouped_matmul.gpu.{choice.kernel}"
    return importlib.import_module(module).PRODUCTS


PRODUCTS = Products(multiply=multiply, contract=contract)
