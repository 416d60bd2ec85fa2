# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention over a spread sequence: queries travel one way, their results straight back home."""

from pallas_kernels.token_ring_attention.api import token_ring_attention

__all__ = ["token_ring_attention"]
