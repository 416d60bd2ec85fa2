# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a sequence that several devices share; queries and results travel."""

from pallas_kernels.token_ring_attention.api import token_ring_attention

__all__ = ["token_ring_attention"]
