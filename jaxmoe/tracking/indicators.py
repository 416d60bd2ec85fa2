# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Indicators of instability over the run: `indicators.npz`.

    <name>[n, l] = the indicator at steps[n] in layer l; NaN where a layer does not have it

written with `--execution.telemetry detailed`. Each is defined in
`jaxmoe/layers/indicators.py` and `jaxmoe/training/indicators.py`. Past `MAX_RECORDS` every second
record of the history is let go. Whether a series is bounded is for `stability.py` to say; the
picture is in `plots.py`.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.disk import DiskGuard, replace_file

logger = logging.getLogger(__name__)

MAX_RECORDS = 2048
PREFIX = "indicators/"
"""Prefix of the means over layers among the metrics of a run."""

History = tuple[np.ndarray, dict[str, np.ndarray]]
"""Steps [n], and values [n L] by name."""


class IndicatorRecorder:
    """Keeps the indicators of every layer and saves them on request.

    Args:
        path: The file, new or of the run that is resumed.
        resume_step: The restored step; later records are dropped. 0 begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        self._path = pathlib.Path(path)
        self._guard = DiskGuard(path)
        self._steps: list[int] = []
        self._rows: list[dict[str, np.ndarray]] = []
        if resume_step > 0 and self._path.exists():
            steps, series = read_indicators(self._path)
            for index in np.flatnonzero(steps <= resume_step):
                self._steps.append(int(steps[index]))
                self._rows.append({name: values[index] for name, values in series.items()})

    def record(self, step: int, indicators: Mapping[str, Any]) -> None:
        """Add the indicators of a step.

        Args:
            step: Optimiser steps done.
            indicators: [L] by name, `StepMetrics.indicators`; none is no record.
        """
        if not indicators:
            return
        row = {name: np.asarray(values, np.float32) for name, values in indicators.items()}
        if self._rows and set(self._rows[-1]) != set(row):
            self._steps, self._rows = [], []  # a resumed run that measures something else
        self._steps.append(int(step))
        self._rows.append(row)
        if len(self._steps) > MAX_RECORDS:
            self._steps, self._rows = self._steps[::2], self._rows[::2]

    def save(self) -> None:
        """Replace the file; an error of the disk is a warning."""
        if not self._rows:
            return
        arrays: dict[str, Any] = {"steps": np.array(self._steps)}
        arrays |= {name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        with self._guard.warning_once():
            replace_file(self._path, buffer.getvalue())


def read_indicators(path: str | os.PathLike[str]) -> History:
    """Return the content of `indicators.npz`.

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


def over_layers(name: str, values: np.ndarray) -> np.ndarray:
    """Return one number for all layers: the largest maximum, the mean of anything else.

    Args:
        name: Of the indicator.
        values: [... L]; NaN is left out.

    Returns:
        [...], NaN where no layer has the indicator.
    """
    values = np.asarray(values, np.float64)
    known = np.isfinite(values)
    if name.endswith("max_logit"):
        top = np.where(known, values, -np.inf).max(axis=-1)
        return np.where(known.any(axis=-1), top, np.nan)
    count = known.sum(axis=-1)
    total = np.where(known, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def scalars_of(indicators: Mapping[str, Any]) -> dict[str, float]:
    """Return the indicators of a step as metrics, one number each."""
    numbers = {name: float(over_layers(name, values)) for name, values in indicators.items()}
    return {f"{PREFIX}{name}": value for name, value in numbers.items() if math.isfinite(value)}
