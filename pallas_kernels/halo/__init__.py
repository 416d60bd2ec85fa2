# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products in few bits whose factors are rotated first, forward and backward (HALO)."""

from pallas_kernels.halo.products import project, project_groups
from pallas_kernels.halo.weights import EncodedWeight, Halo, encode

__all__ = ["EncodedWeight", "Halo", "encode", "project", "project_groups"]
