# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The record of an array that travels between the ranks of a mesh axis.

To add a transport: `pallas_kernels/ring/step.py`.
"""

from typing import NamedTuple

from pallas_kernels.array_types import Array


class Parcel(NamedTuple):
    """An array and the ranks between which it travels."""

    array: Array
    pairs: tuple[tuple[int, int], ...]
    """Pairs (from, to) of ranks; no rank occurs twice on either side."""
