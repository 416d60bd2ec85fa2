# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records the load of every expert over a run in `router.npz`.

    load[n, l, e] = assignments of expert e / assignments of all experts,  in layer l at steps[n]

so that every `load[n, l]` sums to 1 and 1/E is fair. Counts are taken before drops. Past
`MAX_RECORDS` every second record of the history is let go, so that the file stays small however
long the run is; the newest stay as dense as they come. The picture is in `plots.py`, the scalars
are in `jaxmoe/routing/telemetry/summary.py`.
"""

from __future__ import annotations

import io
import logging
import os
import pathlib
import zipfile

import numpy as np

from jaxmoe.disk import DiskGuard, replace_file

logger = logging.getLogger(__name__)

MAX_RECORDS = 2048


class RouterLoadRecorder:
    """Keeps the load of the experts and saves it on request.

    Args:
        path: The file, new or of the run that is resumed.
        resume_step: The restored step; later records are dropped. 0 begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        self._path = pathlib.Path(path)
        self._guard = DiskGuard(path)
        self._steps: list[int] = []
        self._loads: list[np.ndarray] = []
        if resume_step > 0 and self._path.exists():
            steps, loads = read_router_load(self._path)
            kept = steps <= resume_step
            self._steps, self._loads = steps[kept].tolist(), list(loads[kept])

    def record(self, step: int, counts: np.ndarray) -> None:
        """Add the load at a step.

        Args:
            step: Optimiser steps done.
            counts: [L E] assignments of each expert, or any multiple of them.
        """
        counts = np.asarray(counts, np.float64)
        total = counts.sum(axis=-1, keepdims=True)
        load = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        self._steps.append(int(step))
        self._loads.append(load.astype(np.float32))
        if len(self._steps) > MAX_RECORDS:
            self._steps, self._loads = self._steps[::2], self._loads[::2]

    def save(self) -> None:
        """Replace the file; an error of the disk is a warning."""
        if not self._steps:
            return
        buffer = io.BytesIO()
        np.savez_compressed(buffer, steps=np.array(self._steps), load=np.stack(self._loads))
        with self._guard.warning_once():
            replace_file(self._path, buffer.getvalue())


def read_router_load(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the content of `router.npz`.

    Args:
        path: The file.

    Returns:
        steps [n] and load [n L E]. Both are empty, with a warning, for a file that is damaged.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays["steps"], arrays["load"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is not readable (%s): the router's history begins anew", path, error)
        return np.zeros(0, np.int64), np.zeros((0, 0, 0), np.float32)
