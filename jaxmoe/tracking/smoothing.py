# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Smooths, bins and thins long series for charts, and groups experts that share a cell."""

from __future__ import annotations

import numpy as np


def smooth(values: np.ndarray) -> np.ndarray:
    """Return a centred mean over a fiftieth of the run, without NaN.

    Args:
        values: [n].

    Returns:
        [n].
    """
    half = max(1, len(values) // 100)
    finite = np.isfinite(values)
    # Differences of running sums: the length of the window costs nothing.
    places = np.arange(len(values))
    begin = np.maximum(places - half, 0)
    end = np.minimum(places + half + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0), dtype=np.float64)])
    counts = np.concatenate([[0], np.cumsum(finite)])
    count = counts[end] - counts[begin]
    means = np.full(len(values), np.nan)
    return np.divide(sums[end] - sums[begin], count, out=means, where=count > 0)


def bin_means(
    steps: np.ndarray, values: np.ndarray, max_bins: int = 240
) -> tuple[np.ndarray, np.ndarray]:
    """Return means in bins of equal length in steps; an empty bin repeats the previous one.

    Args:
        steps: [n], rising.
        values: [n ...].
        max_bins: At most so many, and at most n.

    Returns:
        Edges [bins + 1] in steps, and means [bins ...].
    """
    bins = min(len(steps), max_bins)
    first = float(steps[0])
    last = float(max(steps[-1], steps[0] + 1))
    edges = np.linspace(first, last, bins + 1)
    index = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, bins - 1)
    means = np.empty((bins, *values.shape[1:]))
    for bin_id in range(bins):
        inside = index == bin_id
        means[bin_id] = values[inside].mean(axis=0) if inside.any() else means[bin_id - 1]
    return edges, means


def thin_curve(
    x: np.ndarray, y: np.ndarray, max_points: int = 600
) -> tuple[np.ndarray, np.ndarray]:
    """Return fewer points of a curve: the lowest and highest of each stretch, and both ends.

    Args:
        x: [n], rising.
        y: [n].
        max_points: About so many remain.

    Returns:
        Points in the order of x; NaN goes, unless nothing else is there.
    """
    finite = np.flatnonzero(np.isfinite(y))
    if len(finite) < len(y) and len(y) > max_points:
        x = x[finite]
        y = y[finite]
    if len(y) <= max_points:
        return x, y
    stretches = np.array_split(np.arange(len(y)), max(1, max_points // 2))
    indices = {0, len(y) - 1}
    for stretch in stretches:
        indices.add(int(stretch[y[stretch].argmin()]))
        indices.add(int(stretch[y[stretch].argmax()]))
    order = np.array(sorted(indices))
    return x[order], y[order]


def worst_of_groups(ratio: np.ndarray, cells: int) -> np.ndarray:
    """Return loads over the fair share, [L E], or [L C] with the worst of neighbours per cell."""
    layers, experts = ratio.shape
    size = -(-experts // cells)
    if size == 1:
        return ratio
    count = -(-experts // size)
    padded = np.ones((layers, count * size))
    padded[:, :experts] = ratio
    groups = padded.reshape(layers, count, size)
    # As far below the fair share as above it: a tenth is as bad as ten times.
    badness = np.abs(np.log(np.maximum(groups, 1e-6)))
    return np.take_along_axis(groups, badness.argmax(-1)[..., None], axis=-1)[..., 0]
