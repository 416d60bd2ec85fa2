# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records the load of every expert over a run in `router.npz`.

    load[n, l, e] = assignments of expert e / assignments of all experts,  in layer l at steps[n]

so that every `load[n, l]` sums to 1 and 1/E is fair. Counts are taken before drops. The picture is
in `plots.py`, the scalars are in `jaxmoe/routing/telemetry/summary.py`.
"""

from __future__ import annotations

import os

import numpy as np

from jaxmoe.tracking.history import HistoryRecorder, read_history


class RouterLoadRecorder(HistoryRecorder):
    """Keeps the load of the experts and saves it on request."""

    def record(self, step: int, counts: np.ndarray) -> None:
        """Add the load at a step.

        Args:
            step: Optimiser steps done.
            counts: [L E] assignments of each expert, or any multiple of them.
        """
        counts = np.asarray(counts, np.float64)
        total = counts.sum(axis=-1, keepdims=True)
        load = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        self.add(step, {"load": load})


def read_router_load(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the content of `router.npz`.

    Args:
        path: The file.

    Returns:
        steps [n] and load [n L E]. Both are empty, with a warning, for a file that is damaged.
    """
    steps, series = read_history(path)
    load = series.get("load", np.zeros((0, 0, 0), np.float32))
    return steps[: len(load)], load
