# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records metrics in `metrics.jsonl`: one JSON object per logged step.

    {"step": 20, "train/loss": 3.2137, "train/grad_norm": 0.41}
    {"step": 20, "text": {"sample": "def main("}}
    {"step": 20, "histogram": {"router/layer_03/load": {"counts": [9, 7], "edges": [0, 1, 2]}}}

Each line goes to the operating system at once, so that a killed process loses none. A resumed run
drops the lines after the step it restored, and a last line that was cut in half. NaN and infinity
become null, which JSON has; so `read_metrics` gives NaN for both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxmoe.disk import DiskGuard
from jaxmoe.json_bounds import read_lines
from jaxmoe.tracking.tracker import Histogram

Series = dict[str, tuple[np.ndarray, np.ndarray]]
"""`{metric: (steps [n], values [n])}`."""


class JsonlTracker:
    """Appends to `metrics.jsonl`; a full disk loses lines and does not end the run.

    Args:
        path: The file, new or of the run that is resumed.
        resume_step: The restored step; later lines are dropped. 0 begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        self._guard = DiskGuard(path)
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = _end_of(path, resume_step)
        os.ftruncate(self._file, self._end)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a line with the numbers."""
        values = {name: float(value) for name, value in metrics.items()}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._append({"step": int(step)} | finite)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Append a line with the text."""
        self._append({"step": int(step), "text": {name: text}})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Append a line with the histograms."""
        lists = {
            name: {"counts": counts.tolist(), "edges": np.round(edges, 4).tolist()}
            for name, (counts, edges) in histograms.items()
        }
        self._append({"step": int(step), "histogram": lists})

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Do nothing: a line holds numbers, and pictures are drawn from the files of the run."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        with self._guard.warning_once():
            try:
                remaining = line
                while remaining:
                    remaining = remaining[os.write(self._file, remaining) :]
                self._end += len(line)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)  # no half line before the next one
                raise


def read_metrics(path: str | os.PathLike[str]) -> Series:
    """Return the numbers of a run from `metrics.jsonl`.

    Args:
        path: The file; lines that are no JSON object (a cut last line) are passed over, and so are
            values that are no numbers.

    Returns:
        Steps and values per metric, in the order of the file.
    """
    series: dict[str, tuple[list[int], list[float]]] = {}
    for _, record in _records(pathlib.Path(path)):
        for name, value in record.items():
            if name != "step" and (value is None or type(value) in (int, float)):
                steps, values = series.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(math.nan if value is None else value)
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in series.items()}


def _end_of(path: pathlib.Path, step: int) -> int:
    """Return the length in bytes of the lines of the first `step` steps."""
    if step <= 0:
        return 0
    end = 0
    for position, record in _records(path):
        if record["step"] > step:
            break
        end = position
    return end


def _records(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete lines of steps: the byte position after each, and its object."""
    for position, record in read_lines(path):
        if type(record.get("step")) is int:
            yield position, record
