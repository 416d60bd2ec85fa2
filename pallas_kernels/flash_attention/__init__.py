# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention that never stores the matrix of scores, with the log-sum-exp."""

from pallas_kernels.flash_attention.api import OPERATION, flash_attention
from pallas_kernels.flash_attention.largest_logits import largest_logits

__all__ = ["OPERATION", "flash_attention", "largest_logits"]
