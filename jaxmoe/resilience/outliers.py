# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names workers that differ from the others over a window of values.

A worker is a part of the mesh with rows of its own: a position on the axes replica x data x expert.
All workers train the same weights on rows of the same distribution, so that their losses and
gradients differ by chance alone; one that computes something else is an outlier long before the
mean moves (silent inconsistency, arXiv 2602.14462).

`OutlierWatch` needs three workers: of two that differ, either may be wrong.
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from sharding.axes import BATCH_AXES, pieces

_MOST_SPREADS = 4.0
"""Difference from the median worker, in spreads, above which a worker is an outlier."""
_LEAST_SHARE = 1e-4
"""Smallest difference of an outlier, as a share of the median."""


def worker_devices(mesh: Mesh, workers: int) -> list[list[jax.Device]]:
    """Return the devices that hold the rows of each worker.

    Args:
        mesh: Mesh from `sharding.make_mesh`.
        workers: Parts of the batch; a multiple or a divisor of the parts that the mesh makes.
    """
    spec = PartitionSpec(pieces(mesh.axis_names, BATCH_AXES))
    parts = NamedSharding(mesh, spec).num_devices
    devices: list[list[jax.Device]] = [[] for _ in range(workers)]
    layout = NamedSharding(mesh, spec).devices_indices_map((parts * workers,))
    for device, (rows,) in layout.items():
        first = rows.start or 0
        last = parts * workers if rows.stop is None else rows.stop
        for worker in range(first // parts, (last - 1) // parts + 1):
            devices[worker].append(device)
    return devices


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """Worker whose values differ from those of the others."""

    worker: int
    excess: float
    """Median over the window of the difference from the median worker."""
    spreads: float
    """The excess in spreads."""


class OutlierWatch:
    """Differences of workers from the median worker, over a window of steps.

    A worker is an outlier when the median of its differences over the window is more than 4
    spreads, 1.4826 x the median size of all differences in the window: one odd batch moves
    neither. Each is named once.

    Args:
        window: Steps; no worker is judged before the window is full.
    """

    def __init__(self, window: int):
        self._rows: collections.deque[np.ndarray] = collections.deque(maxlen=window)
        self._named: set[int] = set()

    def add(self, values: Float[np.ndarray, " W"]) -> list[Outlier]:
        """Return the outliers that have not been named yet.

        Args:
            values: One value for each worker; a step with a value that is not finite is skipped.
        """
        values = np.asarray(values, np.float64)
        if len(values) < 3 or not np.isfinite(values).all():
            return []
        self._rows.append(values)
        if len(self._rows) < (self._rows.maxlen or 0):
            return []
        rows = np.stack(self._rows)
        center = np.median(rows, axis=1, keepdims=True)
        differences = rows - center
        spread = 1.4826 * float(np.median(np.abs(differences)))
        floor = _LEAST_SHARE * float(np.median(np.abs(center)))
        scale = max(spread, floor / _MOST_SPREADS, np.finfo(np.float64).tiny)
        excess = np.median(differences, axis=0)
        outlying = [
            Outlier(worker=int(w), excess=float(excess[w]), spreads=float(abs(excess[w]) / scale))
            for w in np.flatnonzero(np.abs(excess) > _MOST_SPREADS * scale)
            if int(w) not in self._named
        ]
        self._named.update(outlier.worker for outlier in outlying)
        return outlying
