# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multiplies two matrices of which one or both are quantised."""

from pallas_kernels.quantized_matmul.api import OPERATION, quantized_matmul

__all__ = ["OPERATION", "quantized_matmul"]
