# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Linear recurrences whose decay, input and output depend on the token: Mamba and Mamba-2."""

from pallas_kernels.selective_scan.api import (
    DUAL,
    SCAN,
    selective_scan,
    state_space_dual,
)

__all__ = ["DUAL", "SCAN", "selective_scan", "state_space_dual"]
