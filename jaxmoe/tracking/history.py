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
        self._rows: list[dict[str, np.ndarray]] = []
        if resume_step > 0 and self._path.exists():
            steps, series = read_history(self._path)
            for index in np.flatnonzero(steps <= resume_step):
                self._steps.append(int(steps[index]))
                self._rows.append({name: values[index] for name, values in series.items()})

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a record, kept in float32; other names than before begin the history anew.

        Args:
            step: Optimiser steps done.
            values: Arrays by name.
        """
        row = {name: np.asarray(value, np.float32) for name, value in values.items()}
        if self._rows and set(self._rows[-1]) != set(row):
            self._steps, self._rows = [], []  # a resumed run that measures something else
        self._steps.append(int(step))
        self._rows.append(row)
        if len(self._steps) > MAX_RECORDS:
            self._steps, self._rows = self._steps[::2], self._rows[::2]

    def sampled(self, number: int) -> History:
        """Return at most `number` of the records, evenly spaced, the newest included."""
        count = len(self._steps)
        chosen = np.unique(np.linspace(count - 1, 0, min(count, number)).round().astype(int))
        series = {
            name: np.stack([self._rows[index][name] for index in chosen])
            for name in (self._rows[0] if self._rows else ())
        }
        return np.array(self._steps, np.int64)[chosen], series

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
