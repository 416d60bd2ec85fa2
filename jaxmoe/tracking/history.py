# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Keeps arrays by step in one `.npz` file, of bounded size over any length of run.

Past `MAX_RECORDS` every second record is dropped; the newest stay dense.
"""

from __future__ import annotations

import io
import logging
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.disk import DiskGuard, replace_file
from jaxmoe.tracking.tracker import Histogram

logger = logging.getLogger(__name__)

MAX_RECORDS = 2048

History = tuple[np.ndarray, dict[str, np.ndarray]]
"""Steps [n], and values [n ...] by name."""


class HistoryRecorder:
    """Keeps records and saves them on request.

    Args:
        path: The file, new or of the run that is resumed.
        resume_step: The restored step; later records are dropped. 0 begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        self._path = pathlib.Path(path)
        self._guard = DiskGuard(path)
        self._steps: list[int] = []
        self._series: dict[str, np.ndarray] = {}  # [MAX_RECORDS + 1 ...], in float32
        self._is_saved = True
        if resume_step > 0 and self._path.exists():
            steps, series = read_history(self._path)
            for index in np.flatnonzero(steps <= resume_step):
                self.add(int(steps[index]), {name: rows[index] for name, rows in series.items()})

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a record, kept in float32; other names or shapes than before begin it anew.

        Args:
            step: Optimiser steps done.
            values: Arrays by name.
        """
        row = {name: np.asarray(value, np.float32) for name, value in values.items()}
        if {name: rows.shape[1:] for name, rows in self._series.items()} != {
            name: value.shape for name, value in row.items()
        }:
            self._steps = []  # a new run, or one that is resumed and measures something else
            # Pages of memory come with the rows that are written.
            self._series = {
                name: np.empty((MAX_RECORDS + 1, *value.shape), np.float32)
                for name, value in row.items()
            }
        for name, value in row.items():
            self._series[name][len(self._steps)] = value
        self._steps.append(int(step))
        if len(self._steps) > MAX_RECORDS:
            self._steps = self._steps[::2]
            for series in self._series.values():
                series[: len(self._steps)] = series[::2].copy()
        self._is_saved = False

    def sample(self, number: int) -> History:
        """Return at most `number` of the records, evenly spaced, the newest included."""
        count = len(self._steps)
        chosen = np.unique(np.linspace(count - 1, 0, min(count, number)).round().astype(int))
        series = {name: rows[chosen] for name, rows in self._series.items()}
        return np.array(self._steps, np.int64)[chosen], series

    def save(self) -> None:
        """Replace the file; an error of the disk is a warning.

        The arrays are not compressed, which would keep the steps waiting for a tenth of the bytes.
        """
        if self._is_saved:
            return
        count = len(self._steps)
        series = {name: rows[:count] for name, rows in self._series.items()}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, steps=np.array(self._steps), **series)
        with self._guard.warning_once():
            replace_file(self._path, buffer.getbuffer())
            self._is_saved = True


def read_history(path: str | os.PathLike[str]) -> History:
    """Return the records of a file.

    Args:
        path: The file.

    Returns:
        Steps and series; both are empty, with a warning, for a file that is damaged.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            series = {name: arrays[name] for name in arrays.files if name != "steps"}
            return arrays["steps"], series
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is not readable (%s): its history begins anew", path, error)
        return np.zeros(0, np.int64), {}


MAX_EXPERT_SCALARS = 256
"""Largest L * E with one scalar per expert; larger models have one histogram per layer."""
_BINS = 32


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


def load_metrics(load: np.ndarray) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return the load of every layer and expert under the names that trackers show.

    Loads are multiples of the fair share: 1 is fair, 0 is an expert without a token. Layers are
    those with a router, numbered from 0 as in the report.

        router/layer_03/max_violation, min_violation, load_entropy    always
        router/layer_03/load_expert_07      up to `MAX_EXPERT_SCALARS` experts of all layers
        router/layer_03/load                beyond: a histogram over the experts

    Args:
        load: [L E] shares of the assignments.

    Returns:
        Scalars by name, and histograms by name.
    """
    layers, experts = load.shape
    share = np.asarray(load, np.float64)
    ratio = share * experts
    entropy = -np.sum(share * np.log(np.where(share > 0.0, share, 1.0)), -1)
    entropy /= np.log(max(experts, 2))
    scalars: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    width = max(2, len(str(experts - 1)))
    for layer, row in enumerate(ratio):
        name = f"router/layer_{layer:0{max(2, len(str(layers - 1)))}}"
        is_routed = bool(row.any())  # not in a batch of padding
        scalars[f"{name}/max_violation"] = float(row.max()) - 1.0 if is_routed else 0.0
        scalars[f"{name}/min_violation"] = 1.0 - float(row.min()) if is_routed else 0.0
        scalars[f"{name}/load_entropy"] = float(entropy[layer])
        if layers * experts <= MAX_EXPERT_SCALARS:
            for expert, value in enumerate(row):
                scalars[f"{name}/load_expert_{expert:0{width}}"] = float(value)
        else:
            top = max(2.0, float(row.max()))
            histograms[f"{name}/load"] = np.histogram(row, bins=_BINS, range=(0.0, top))
    return scalars, histograms
