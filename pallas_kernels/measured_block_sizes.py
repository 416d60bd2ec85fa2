# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measured sizes of blocks, written by `python -m experiments.bench blocks`: not by hand.

    BLOCK_SIZES[operation][kind of device][bucket] = "name=size name=size"

What a bucket is, and what holds where none is near: block_sizes.py.
"""

from collections.abc import Mapping

Table = Mapping[str, Mapping[str, Mapping[str, str]]]

BLOCK_SIZES: Table = {}
