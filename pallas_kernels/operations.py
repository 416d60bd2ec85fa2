# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Lists the operations and their implementations."""

from pallas_kernels.backend import Operation
from pallas_kernels.flash_attention import OPERATION as _FLASH_ATTENTION
from pallas_kernels.grouped_matmul import OPERATION as _GROUPED_MATMUL
from pallas_kernels.grouped_matmul import OUTER as _GROUPED_OUTER
from pallas_kernels.grouped_swiglu import OPERATION as _GROUPED_SWIGLU
from pallas_kernels.paged_attention import OPERATION as _PAGED_ATTENTION
from pallas_kernels.quantized_matmul import OPERATION as _QUANTIZED_MATMUL
from pallas_kernels.selective_scan import OPERATION as _SELECTIVE_SCAN
from pallas_kernels.selective_scan import STATE_SPACE_DUAL as _STATE_SPACE_DUAL

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
