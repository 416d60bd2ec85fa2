# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects and runs the GPU kernel of quantized_matmul.

    widened    Hopper, Mosaic GPU: w becomes bfloat16 on its way to WGMMA; floating x, or few rows
    few_bits   Hopper, Mosaic GPU: float8 with float8, and integers, multiplied in 8 bits
    triton     Triton: float32, blocks of 32, and other GPUs from compute capability 8.0 on

    float x, w of 8 or 4 bits     widened           at every number of rows
    float8 x float8               few_bits          up to 128 rows, or two kinds of float8: widened
    int8 or int4, both            few_bits          up to 128 rows: widened, where that is exact

int4 is read as XLA stores it, two to a byte along n; only few_bits copies w, because it transposes
it. Hopper does not multiply int4: int4 saves memory, and thereby time where rows are few. A
`MixedArray` (COMET) therefore runs as W4A8 on Hopper.

What no kernel takes is refused with the alternatives. Two floating factors are multiplied by XLA.

To add a GPU kernel: `pallas_kernels/quantized_matmul/gpu/<name>.py` with `multiply`, its condition
in `kernel_for` of `pallas_kernels/quantized_matmul/gpu/kernels.py`, a row in
`tests/pallas_kernels/quantized_matmul/test_quantized_matmul_for_gpu.py`.
"""

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.gpu.choice import (
    KernelChoice,
    choose_kernel,
    reason_against_gpu,
    reason_against_this_gpu,
)
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.quantized_matmul.gpu.scales import Scaled
from pallas_kernels.quantized_matmul.gpu.tiles import (
    blocks_of,
    exact_products,
    is_widened,
    reason_against,
)
from pallas_kernels.quantized_matmul.mixed_array import MixedArray

# Smallest step along k of a Triton program; scale blocks are a multiple of it.
_STEP = 32


def kernel_for(capability: tuple[int, int] | None, x: Any, w: QuantizedArray) -> KernelChoice:
    """Return the kernel of one product.

    Args:
        capability: Compute capability, (9, 0) for Hopper; None if the GPU is not an NVIDIA GPU.
        x: Left factor, floating or quantised.
        w: Right factor.

    Raises:
        ValueError: No kernel runs on this GPU or takes these factors.
    """
    refusal = _refusal(capability, x, w)
    if capability is None or refusal is not None:
        raise ValueError(refusal)
    against = reason_against(x, w)
    if is_widened(x, w):
        why = "has WGMMA, and reading w takes the time"
        return choose_kernel(capability, against, hopper="widened", because=why)
    why = "has WGMMA, and multiplying takes the time"
    return choose_kernel(capability, against, hopper="few_bits", because=why)


def _refusal(capability: tuple[int, int] | None, x: Any, w: QuantizedArray) -> str | None:
    """Return why no kernel runs on this GPU or takes these factors; None if one does."""
    if (against_gpu := reason_against_gpu(capability)) is not None:
        return f"quantized_matmul: implementation='pallas_gpu': {against_gpu}: choose 'xla'."
    if not isinstance(x, QuantizedArray) and x.dtype not in _FLOATING:
        return (
            f"quantized_matmul: the kernels of 'pallas_gpu' take an x in {', '.join(_FLOATING)} or "
            f"quantised, not {x.dtype}: cast it, or choose 'xla'."
        )
    block = blocks_of(x, w)
    if block is not None and block % _STEP:
        near = sorted({max(1, round(block / _STEP)) * _STEP, -(-block // _STEP) * _STEP})
        return (
            f"quantized_matmul: the kernels of 'pallas_gpu' take blocks of scales of a multiple of "
            f"{_STEP}, not of {block}: quantize with block_size={' or '.join(map(str, near))}, or "
            "choose 'xla'."
        )
    return None


def reason_against_default(*factors: Any) -> str | None:
    """Return why XLA multiplies two factors by default; None if a kernel does, or XLA in any case.

    Args:
        *factors: x and w, of which a MixedArray stands for its weights; or nothing, for the device
            alone.
    """
    against = reason_against_this_gpu()
    if against is not None or not factors:
        return against
    x, w = factors
    w = w.weights if isinstance(w, MixedArray) else w
    if not isinstance(w, QuantizedArray):
        return None
    return _refusal(device_capability("quantized_matmul"), x, w)


_FLOATING = ("bfloat16", "float16", "float32")


def quantized_matmul(
    x: Float[Array, "m k"] | QuantizedArray, w: Float[Array, "k n"] | QuantizedArray, out_dtype: Any
) -> Float[Array, "m n"]:
    """Return what `pallas_kernels.quantized_matmul` returns."""
    if not isinstance(w, QuantizedArray):
        assert not isinstance(x, QuantizedArray)  # checked by quantized_factors.py
        out = jnp.matmul(
            x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return out.astype(out_dtype)
    capability = device_capability("quantized_matmul")
    kernel = kernel_for(capability, x, w).kernel
    return run(kernel, x, w, out_dtype, has_float8=capability is not None and capability >= (8, 9))


def run(
    kernel: str,
    x: Any,
    w: QuantizedArray,
    out_dtype: Any,
    *,
    has_float8: bool = True,
    interpret: Any = None,
) -> Array:
    """Return x @ w, computed by the named kernel.

    Args:
        kernel: Name of a kernel that takes the factors: "widened", "few_bits" or "triton".
        x: Left factor [m k].
        w: Right factor [k n].
        out_dtype: Dtype of the result.
        has_float8: Whether the GPU reads float8.
        interpret: Interpreter for the CPU: `InterpretGPUParams()`, or True for Triton.
    """
    factors = Scaled.of(x, w, blocks_of(x, w))
    # Imported on use: the GPU half of Pallas is slow to import.
    module = importlib.import_module(f"pallas_kernels.quantized_matmul.gpu.{kernel}")
    options: dict[str, Any] = {"interpret": interpret}
    if kernel == "widened":
        options["exact"] = exact_products(x, w)
    if kernel == "triton":
        options = {"interpret": bool(interpret), "has_float8": has_float8}
    narrow = jnp.dtype(out_dtype if jnp.dtype(out_dtype).name in _FLOATING else jnp.float32)
    return module.multiply(factors, out_dtype=narrow, **options).astype(out_dtype)
