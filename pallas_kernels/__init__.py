# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Device code: functions from arrays to arrays, without meshes, modules or configs.

    flash_attention       exact attention that never stores the scores; returns (out, lse)
    ring_attention        attention over a sequence that several devices share; keys travel
    token_ring_attention  the same; queries and results travel
    sequence_order        order of the tokens when several devices share a sequence
    paged_attention       attention of many sequences over one pool of pages
    grouped_matmul        rows sorted by group, times their group's matrix
    grouped_outer         gradient of the groups' matrices
    grouped_swiglu        rows sorted by group, through their group's SwiGLU (experts of a MoE)
    quantize              array in 8 or 4 bits with scales, a QuantizedArray; dequantize undoes it
    quantize_mixed        4-bit weights with 8-bit activations for outliers, a MixedArray
    quantized_matmul      product of two matrices of which one or both are quantised
    selective_scan        recurrence with a decay per channel and value of the state (Mamba)
    state_space_dual      recurrence with a decay per head, as products in chunks (Mamba-2)
    hadamard              orthonormal rotation along one axis, which spreads outliers
    halo                  products of weights and activations in few bits, forward and backward

`OPERATIONS` has the implementations of each operation:
`OPERATIONS["flash_attention"].choose(None)` names the one that runs on this machine, and why.

Functions have the names of their packages. To import from such a package, name it in full:
`from pallas_kernels.flash_attention import reference`.

To add an operation: `pallas_kernels/<name>/api.py` with its `OPERATION`,
`pallas_kernels/<name>/reference.py`, a line in `OPERATIONS` of `pallas_kernels/__init__.py`.
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
from pallas_kernels.paged_attention import OPERATION as _PAGED_ATTENTION
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_array import QuantizedArray, dequantize, quantize
from pallas_kernels.quantized_matmul import OPERATION as _QUANTIZED_MATMUL
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul.mixed_array import MixedArray, quantize_mixed
from pallas_kernels.ring_attention import ring_attention
from pallas_kernels.selective_scan import OPERATION as _SELECTIVE_SCAN
from pallas_kernels.selective_scan import STATE_SPACE_DUAL as _STATE_SPACE_DUAL
from pallas_kernels.selective_scan import selective_scan, state_space_dual
from pallas_kernels.sequence_layout import sequence_order
from pallas_kernels.token_ring_attention import token_ring_attention

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        _FLASH_ATTENTION,
        _GROUPED_MATMUL,
        _GROUPED_OUTER,
        _GROUPED_SWIGLU,
        _PAGED_ATTENTION,
        _QUANTIZED_MATMUL,
        _SELECTIVE_SCAN,
        _STATE_SPACE_DUAL,
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
    "paged_attention",
    "quantize",
    "quantize_mixed",
    "quantized_matmul",
    "ring_attention",
    "selective_scan",
    "sequence_order",
    "state_space_dual",
    "token_ring_attention",
]
