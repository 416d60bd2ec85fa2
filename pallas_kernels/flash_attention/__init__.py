# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention that never stores the matrix of scores, with the log-sum-exp."""

from pallas_kernels.flash_attention.api import OPERATION, flash_attention
from pallas_kernels.flash_attention.largest_logits import largest_logits
from pallas_kernels.flash_attention.residuals import ATTENDED

__all__ = ["ATTENDED", "OPERATION", "flash_attention", "largest_logits"]
