# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Multiplies rows sorted by group by their group's matrix: the experts of a dropless MoE."""

from pallas_kernels.grouped_matmul.api import OPERATION, OUTER, grouped_matmul, grouped_outer

__all__ = ["OPERATION", "OUTER", "grouped_matmul", "grouped_outer"]
