# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Applies each group's own SwiGLU to rows sorted by group: the experts of a dropless MoE."""

from pallas_kernels.grouped_swiglu.additions import Additions, LowRankFactors
from pallas_kernels.grouped_swiglu.api import (
    OPERATION,
    adds_factors,
    grouped_swiglu,
    reads_halves,
)
from pallas_kernels.grouped_swiglu.rows import HIDDEN, RowIndices

__all__ = [
    "HIDDEN",
    "OPERATION",
    "Additions",
    "LowRankFactors",
    "RowIndices",
    "adds_factors",
    "grouped_swiglu",
    "reads_halves",
]
