# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replaces lost layers by weighted means of their neighbours (CheckFree, arXiv 2506.15461).

    W_i = (g_after W_after + g_before W_before) / (g_after + g_before),    g = norm + 1e-4

with the norm of the clipped gradient in the last accepted step, over all layers that one such W
has. Lost layers that follow one another are replaced together, by as many layers before and after
them: layer j of a lost stage becomes the mean of the layers j of the stages beside it. At an end,
or beside other lost layers, the only neighbour is copied; with `training.skipping.order` of
CheckFree+, swapped_ends, it was trained for the place of the end as well as for its own.

No mean replaces rows of the vocabulary, which stages hold parts of. As CheckFree+ copies embedding
and head to neighbouring stages, each stage keeps the rows of the one before it, in a ring
(`layer_norms.py`, which keeps the norms as well).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import Float

RATE = 1.1
"""Factor on the learning rate after a replacement."""
_LEAST = 1e-4
"""Number added to every norm."""

Sources = Mapping[int, tuple[tuple[int, float], ...]]
"""Layers from which each lost layer is made, with their weights, whose sum is 1."""


def sources_of(lost: Collection[int], norms: Float[np.ndarray, " layers"]) -> Sources:
    """Return the layers from which lost layers are made.

    Args:
        lost: Numbers of the lost layers.
        norms: Gradient norm of each layer; zeros, which give plain means, if unknown.

    Raises:
        ValueError: Lost layers have not as many layers on one side that survive.
    """
    sources = {}
    for first, last in _runs(sorted(lost)):
        size = last - first
        sides = []
        for start in (first - size, last):
            layers = range(start, start + size)
            if start >= 0 and layers.stop <= len(norms) and not set(layers) & set(lost):
                sides.append((start, math.hypot(*norms[start : start + size]) + _LEAST))
        if not sides:
            raise ValueError(
                f"layers {first} to {last - 1} of {len(norms)} are lost, and neither the {size}"
                " before nor the same number after them survive"
            )
        total = sum(weight for _, weight in sides)
        for place in range(size):
            sources[first + place] = tuple((s + place, weight / total) for s, weight in sides)
    return sources


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return numbers that follow one another as (first, last + 1)."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [(run[0], run[-1] + 1) for run in runs]
