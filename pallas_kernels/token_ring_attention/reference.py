# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reference of token_ring_attention, which is that of ring_attention."""

from pallas_kernels.ring_attention.reference import ring_attention as token_ring_attention

__all__ = ["token_ring_attention"]
