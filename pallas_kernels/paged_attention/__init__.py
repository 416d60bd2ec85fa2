# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of many sequences over one pool of pages of keys and values."""

from pallas_kernels.paged_attention.api import OPERATION, paged_attention

__all__ = ["OPERATION", "paged_attention"]
