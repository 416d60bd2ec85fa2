# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""flash_attention on NVIDIA GPUs: which kernels a call gets, and why.

    hopper   Mosaic GPU, with WGMMA and TMA: compute capability 9.0, bfloat16 and float16
    triton   Triton: compute capability 8.0 and later, also float32
    xla      no kernel of ours: what both refuse; a warning says so

The choice is a pure function of the GPU, the dtype and the widths of the heads, made once for each
pass; heads too wide for the registers of one backward pass may still have the forward pass.

To add a kind of GPU: a file beside the two, a name in `Kernel`, its line in `choose_kernel`.
"""

import importlib
import warnings
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.array_types import Array, Float
from pallas_kernels.flash_attention import xla
from pallas_kernels.flash_attention.gpu.hopper_tiles import reason_against
from pallas_kernels.flash_attention.kernels import Kernels
from pallas_kernels.flash_attention.mask import Rules, Tokens
from pallas_kernels.gpu.capability import device_capability
from pallas_kernels.jax_versions import cuda_version

Kernel = Literal["hopper", "triton", "xla"]

WIDEST = 256
"""Head of a kernel."""

# From 12.8.0 up to 12.9.1 ptxas miscompiles causal loops around WGMMA: JAX's own kernel
# (jax.experimental.pallas.ops.gpu.attention_mgpu) refuses these versions.
_WRONG_CUDA = 12080, 12091


class KernelChoice(NamedTuple):
    """A kernel and the reason why it runs."""

    kernel: Kernel
    reason: str


def choose_kernel(
    capability: tuple[int, int] | None,
    dtype: Any,
    h: int,
    hv: int,
    *,
    backward: bool,
    cuda: int | None = None,
) -> KernelChoice:
    """The kernel of one pass.

    Args:
        capability: Compute capability of the GPU, (9, 0) for Hopper; None for no NVIDIA GPU.
        dtype: Of queries, keys and values.
        h: Width of a query and key head.
        hv: Width of a value head.
        backward: Which pass.
        cuda: Version of CUDA, 13000 for 13.0; None where it is not there.
    """
    if capability is None:
        return KernelChoice("xla", "the kernels are for NVIDIA GPUs")
    words = f"compute capability {capability[0]}.{capability[1]}"
    if capability < (8, 0):
        return KernelChoice("xla", f"the kernels need compute capability 8.0, this has {words}")
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return KernelChoice("xla", f"no kernel multiplies {jnp.dtype(dtype).name}")
    if max(h, hv) > WIDEST:
        return KernelChoice("xla", f"heads {max(h, hv)} wide are wider than {WIDEST}")
    if capability[0] != 9:
        return KernelChoice("triton", f"{words} has no WGMMA, which is of 9.0 alone")
    against = reason_against(dtype, h, hv, backward=backward)
    if cuda is not None and _WRONG_CUDA[0] <= cuda < _WRONG_CUDA[1]:
        against = f"CUDA {cuda // 1000}.{cuda % 1000 // 10} translates masked loops wrongly"
    if against is None:
        return KernelChoice("hopper", f"{words} has WGMMA and TMA")
    return KernelChoice("triton", against)


def attend(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
) -> tuple[Float[Array, "B S N Hv"], Float[Array, "B N S"]]:
    """See `pallas_kernels.flash_attention`."""
    return _kernels_for(q, v, backward=False).attend(q, k, v, tokens, rules)


def differentiate(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B U M H"],
    v: Float[Array, "B U M Hv"],
    tokens: Tokens,
    rules: Rules,
    d_out: Float[Array, "B S N Hv"],
    lse: Float[Array, "B N S"],
    delta: Float[Array, "B N S"],
) -> tuple[Float[Array, "B S N H"], Float[Array, "B U M H"], Float[Array, "B U M Hv"]]:
    """See `pallas_kernels.flash_attention.kernels`."""
    kernels = _kernels_for(q, v, backward=True)
    return kernels.differentiate(q, k, v, tokens, rules, d_out, lse, delta)


def _kernels_for(q: Array, v: Array, *, backward: bool) -> Kernels:
    choice = choose_kernel(
        device_capability("flash_attention"),
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        backward=backward,
        cuda=cuda_version(),
    )
    if choice.kernel != "xla":
        # Imported where it is used: the GPU's half of Pallas takes a while, and few need it.
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
