# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""quantized_matmul on NVIDIA GPUs: which kernel two factors get, and why.

    widened    Hopper, Mosaic GPU: w becomes bfloat16 on its way to WGMMA: a floating x, few rows
    few_bits   Hopper, Mosaic GPU: float8 with float8, and integers, multiplied in 8 bits
    triton     Triton: float32, blocks of 32, other GPUs from compute capability 8.0 on

    float x, w of 8 or 4 bits     widened           at every number of rows
    float8 x float8               few_bits          up to 128 rows, or of two kinds: widened
    int8 or int4, both            few_bits          up to 128 rows: widened, where that is exact

int4 is read as XLA stores it, two to a byte along n: no copy of w is made, but by few_bits, which
turns w round in any case. Hopper multiplies no int4: it saves memory, and thereby time where rows
are few. So a `MixedArray` (COMET) is on Hopper what its weights are, W4A8.

The choice is a pure function of the GPU and of shapes and dtypes. What no kernel takes is refused,
with what would be taken. Two floating factors are XLA's own product.

To add a kernel: a file beside these, a name in `Kernel`, its line in `choose_kernel`.
"""

import importlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_matmul.gpu.scales import Scaled
from pallas_kernels.quantized_matmul.gpu.tiles import (
    blocks_of,
    exact_products,
    is_widened,
    reason_against,
)

Kernel = Literal["widened", "few_bits", "triton"]

# Steps of k of a Triton program, at least: blocks of scales are a multiple of it.
_STEP = 32


class KernelChoice(NamedTuple):
    """A kernel and the reason why it runs."""

    kernel: Kernel
    reason: str


def choose_kernel(capability: tuple[int, int] | None, x: Any, w: QuantizedArray) -> KernelChoice:
    """The kernel of one product.

    Args:
        capability: Compute capability of the GPU, (9, 0) for Hopper; None for no NVIDIA GPU.
        x: Rows: floating, or quantised.
        w: Columns.

    Raises:
        ValueError: No kernel takes them.
    """
    if capability is None or capability < (8, 0):
        words = "no GPU of NVIDIA's" if capability is None else "compute capability {}.{}"
        raise ValueError(
            "quantized_matmul: the kernels of 'pallas_gpu' need an NVIDIA GPU of compute capability"
            f" 8.0 or later, and this is {words.format(*capability or ())}: choose 'xla'."
        )
    if not isinstance(x, QuantizedArray) and x.dtype not in _FLOATING:
        raise ValueError(
            f"quantized_matmul: the kernels of 'pallas_gpu' take an x in {', '.join(_FLOATING)} or "
            f"quantised, not {x.dtype}: cast it, or choose 'xla'."
        )
    block = blocks_of(x, w)
    if block is not None and block % _STEP:
        near = sorted({max(1, round(block / _STEP)) * _STEP, -(-block // _STEP) * _STEP})
        raise ValueError(
            f"quantized_matmul: the kernels of 'pallas_gpu' take blocks of scales of a multiple of "
            f"{_STEP}, not of {block}: quantize with block_size={' or '.join(map(str, near))}, or "
            "choose 'xla'."
        )
    words = f"compute capability {capability[0]}.{capability[1]}"
    if capability[0] != 9:
        return KernelChoice("triton", f"{words} has no WGMMA, which is of 9.0 alone")
    against = reason_against(x, w)
    if against is not None:
        return KernelChoice("triton", against)
    if is_widened(x, w):
        return KernelChoice("widened", f"{words} has WGMMA, and reading w takes the time")
    return KernelChoice("few_bits", f"{words} has WGMMA, and multiplying takes the time")


_FLOATING = ("bfloat16", "float16", "float32")


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray, w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m n"]:
    """See `pallas_kernels.quantized_matmul`."""
    if not isinstance(w, QuantizedArray):
        assert not isinstance(x, QuantizedArray)  # quantized_factors.py refuses it
        out = jnp.matmul(
            x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return out.astype(out_dtype)
    capability = device_capability("quantized_matmul")
    kernel = choose_kernel(capability, x, w).kernel
    return run(kernel, x, w, out_dtype, has_float8=capability is not None and capability >= (8, 9))


def run(
    kernel: Kernel,
    x: Any,
    w: QuantizedArray,
    out_dtype: Any,
    *,
    has_float8: bool = True,
    interpret: Any = None,
) -> Array:
    """x @ w by one kernel.

    Args:
        kernel: That takes them.
        x: Rows.
        w: Columns.
        out_dtype: Of the result.
        has_float8: The GPU can read it.
        interpret: What runs the kernel on the CPU: `interpreted_gpu()`, or True for Triton.
    """
    factors = Scaled.of(x, w, blocks_of(x, w))
    # Imported where it is used: the GPU's half of Pallas takes a while, and few need it.
    module = importlib.import_module(f"pallas_kernels.quantized_matmul.gpu.{kernel}")
    options: dict[str, Any] = {"interpret": interpret}
    if kernel == "widened":
        options["exact"] = exact_products(x, w)
    if kernel == "triton":
        options = {"interpret": bool(interpret), "has_float8": has_float8}
    narrow = jnp.dtype(out_dtype if jnp.dtype(out_dtype).name in _FLOATING else jnp.float32)
    return module.multiply(factors, out_dtype=narrow, **options).astype(out_dtype)
