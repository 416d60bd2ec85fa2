# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selects the GPU kernel of each pass of flash_attention.

    hopper   Mosaic GPU, with WGMMA and TMA: compute capability 9.0, bfloat16 and float16
    triton   Triton: compute capability 8.0 and later, also float32
    xla      no kernel; used for everything else, with a warning

The choice is made once per pass. Heads too wide for the registers of the Hopper backward pass may
still use the Hopper forward pass.

To add a GPU kernel: `pallas_kernels/flash_attention/gpu/<name>.py` with `KERNELS`, its condition in
`kernel_for` of `pallas_kernels/flash_attention/gpu/kernels.py`, a row in
`tests/pallas_kernels/flash_attention/test_flash_attention_for_gpu.py`.
"""

import importlib
import warnings
from typing import Any

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.gpu.hopper_tiles import reason_against
from pallas_kernels.flash_attention.kernels import AttentionOperands, Kernels, OutGradient
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.gpu.choice import (
    KernelChoice,
    choose_kernel,
    reason_against_gpu,
    reason_against_this_gpu,
)
from pallas_kernels.jax_versions import cuda_version

WIDEST = 256
"""Largest head width of the kernels."""

# ptxas of CUDA 12.8.0 to 12.9.1 miscompiles causal loops around WGMMA; JAX's own kernel
# (jax.experimental.pallas.ops.gpu.attention_mgpu) refuses these versions too.
_WRONG_CUDA = 12080, 12091


def kernel_for(
    capability: tuple[int, int] | None,
    dtype: Any,
    h: int,
    hv: int,
    *,
    backward: bool,
    cuda: int | None = None,
) -> KernelChoice:
    """Return the kernel of one pass.

    Args:
        capability: Compute capability, (9, 0) for Hopper; None if the GPU is not an NVIDIA GPU.
        dtype: Dtype of queries, keys and values.
        h: Width of a query and key head.
        hv: Width of a value head.
        backward: Whether the backward pass is asked for.
        cuda: CUDA version, 13000 for 13.0; None if CUDA is not loaded.
    """
    against_gpu = reason_against_gpu(capability)
    if capability is None or against_gpu is not None:
        return KernelChoice("xla", str(against_gpu))
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return KernelChoice("xla", f"no kernel multiplies {jnp.dtype(dtype).name}")
    if max(h, hv) > WIDEST:
        return KernelChoice("xla", f"heads {max(h, hv)} wide are wider than {WIDEST}")
    against = reason_against(dtype, h, hv, backward=backward)
    if cuda is not None and _WRONG_CUDA[0] <= cuda < _WRONG_CUDA[1]:
        against = f"CUDA {cuda // 1000}.{cuda % 1000 // 10} translates masked loops wrongly"
    return choose_kernel(capability, against)


def reason_against_default(*arrays: Any) -> str | None:
    """Return why XLA runs the forward pass by default; None if a kernel does.

    Args:
        *arrays: q, k and v, of which dtype and widths count, and what else the operation takes; or
            nothing, for the device alone.
    """
    against = reason_against_this_gpu()
    if against is not None or not arrays:
        return against
    q, _, v, *_ = arrays
    capability = device_capability("flash_attention")
    widths = q.shape[-1], v.shape[-1]
    choice = kernel_for(capability, q.dtype, *widths, backward=False, cuda=cuda_version())
    return choice.reason if choice.kernel == "xla" else None


def attend(operands: AttentionOperands) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """Return what `pallas_kernels.flash_attention` returns."""
    return _kernels_for(operands, backward=False).attend(operands)


def differentiate(operands: AttentionOperands, gradient: OutGradient) -> tuple[Array, Array, Array]:
    """Return the gradients defined in `pallas_kernels.flash_attention.kernels`."""
    return _kernels_for(operands, backward=True).differentiate(operands, gradient)


def _kernels_for(operands: AttentionOperands, *, backward: bool) -> Kernels:
    q, _, v, *_ = operands
    choice = kernel_for(
        device_capability("flash_attention"),
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        backward=backward,
        cuda=cuda_version(),
    )
    if choice.kernel != "xla":
        # Imported on use: the GPU half of Pallas is slow to import.
        module = f"pallas_kernels.flash_attention.gpu.{choice.kernel}"
        return importlib.import_module(module).KERNELS
    passes = "backward" if backward else "forward"
    warnings.warn(
        f"flash_attention: XLA runs the {passes} pass instead of a kernel, because "
        f"{choice.reason}.",
        stacklevel=2,
    )
    return xla.KERNELS


KERNELS = Kernels(attend, differentiate)
