# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exact attention over a sequence that several devices share; keys travel."""

from pallas_kernels.ring_attention.api import ring_attention

__all__ = ["ring_attention"]
