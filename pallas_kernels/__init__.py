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
`pallas_kernels/<name>/reference.py`, a line in `OPERATIONS` of `pallas_kernels/operations.py`.
"""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
