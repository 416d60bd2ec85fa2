# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Device code: arrays in, arrays out. It knows no mesh object, no module and no config.

    flash_attention  exact attention that never stores the matrix of scores; returns (out, lse)
    grouped_matmul   rows sorted by group, each group times its own matrix
    grouped_swiglu   rows sorted by group, each through its group's SwiGLU (the experts of a MoE)
    quantize         an array in 8 or 4 bits with scales, a QuantizedArray; dequantize gives it back
    ring_attention   attention over a sequence that several devices share, in a jax.shard_map
    quantize_mixed   weights of 4 bits that keep activations of 8 where they are large, a MixedArray
    sequence_order   which token stands where when several devices share a sequence

    hadamard              an orthonormal rotation along one axis, which spreads outliers
    halo                  products of weights and activations in few bits, forward and backward
    grouped_outer         the gradient of the groups' matrices
    quantized_matmul      the product of two matrices of which one or both are quantised
    token_ring_attention  the same as ring_attention; queries travel, their results go home

`OPERATIONS` holds them with the table of their implementations:
`OPERATIONS["flash_attention"].choose(None)` says which one runs on this machine, and why.

The functions carry the names of the packages that hold them. To reach inside such a package,
import from it: `from pallas_kernels.flash_attention import reference`.

To add an operation: a package with api.py and reference.py, its `OPERATION` in the table below.
"""

from pallas_kernels.backend import Choice, Implementation, Operation
from pallas_kernels.flash_attention import OPERATION as _FLASH_ATTENTION
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_matmul import OPERATION as _GROUPED_MATMUL
from pallas_kernels.grouped_matmul import OUTER as _GROUPED_OUTER
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_swiglu import OPERATION as _GROUPED_SWIGLU
from pallas_kernels.grouped_swiglu import grouped_swiglu
from pallas_kernels.halo.hadamard import hadamard
from pallas_kernels.quantized_array import QuantizedArray, dequantize, quantize
from pallas_kernels.quantized_matmul import OPERATION as _QUANTIZED_MATMUL
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul.mixed_array import MixedArray, quantize_mixed
from pallas_kernels.ring_attention import ring_attention
from pallas_kernels.sequence_layout import sequence_order
from pallas_kernels.token_ring_attention import token_ring_attention

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        _FLASH_ATTENTION,
        _GROUPED_MATMUL,
        _GROUPED_OUTER,
        _GROUPED_SWIGLU,
        _QUANTIZED_MATMUL,
    )
}

__all__ = [
    "OPERATIONS",
    "Choice",
    "Implementation",
    "MixedArray",
    "Operation",
    "QuantizedArray",
    "dequantize",
    "flash_attention",
    "grouped_matmul",
    "grouped_outer",
    "grouped_swiglu",
    "hadamard",
    "quantize",
    "quantize_mixed",
    "quantized_matmul",
    "ring_attention",
    "sequence_order",
    "token_ring_attention",
]
