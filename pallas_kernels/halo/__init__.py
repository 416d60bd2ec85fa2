# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Products in few bits whose factors are rotated first, forward and backward (HALO)."""

from pallas_kernels.public_names import load_when_used

load_when_used(__name__)
