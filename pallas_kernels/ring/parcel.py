# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What travels between the ranks of a mesh axis: an array, and from where to where.

To add a way to travel, see ring_step.py.
"""

from typing import NamedTuple

from pallas_kernels.array_types import Array


class Parcel(NamedTuple):
    """Something on its way."""

    array: Array
    pairs: tuple[tuple[int, int], ...]
    """(from, to); no rank twice on either side."""
