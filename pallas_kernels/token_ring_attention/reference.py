# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The oracle of token_ring_attention: that of ring_attention, for what travels is no part of it."""

from pallas_kernels.ring_attention.reference import ring_attention as token_ring_attention

__all__ = ["token_ring_attention"]
