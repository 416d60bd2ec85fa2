# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs linear recurrences whose decay depends on the token: the scans of Mamba and Mamba-2."""

from pallas_kernels.selective_scan.api import (
    OPERATION,
    STATE_SPACE_DUAL,
    selective_scan,
    state_space_dual,
)

__all__ = ["OPERATION", "STATE_SPACE_DUAL", "selective_scan", "state_space_dual"]
