# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records metrics in `metrics.jsonl`: one JSON object per logged step.

    {"step": 20, "train/loss": 3.2137, "train/grad_norm": 0.41}
    {"step": 20, "text": {"sample": "def main("}}
    {"step": 20, "histogram": {"router/layer_03/load": {"counts": [9, 7], "edges": [0, 1, 2]}}}

A run of a million steps has a gigabyte of them: a report reads all losses and some thousands of
the lines whole, and what resumes reads the last ones.

Each line goes to the operating system at once, so that a killed process loses none. A resumed run
drops the lines after the step it restored, and a last line that was cut in half. NaN and infinity
become null, which JSON has; so `read_metrics` gives NaN for both.
"""

from __future__ import annotations

import array
import collections
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.disk import DiskGuard
from jaxmoe.json_bounds import parse_line, read_byte_lines, read_byte_lines_backwards
from jaxmoe.tracking.tracker import LOSS, Histogram

Series = dict[str, tuple[np.ndarray, np.ndarray]]
"""`{metric: (steps [n], values [n])}`."""

CURVE_LINES = 4000
"""Lines of training steps that a curve of a long run is drawn from."""
_LAST_LINES = 10_000
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')
_TRAINING_LINE = re.compile(_STEP.pattern + rb' "%b": (-?\d[\d.e+-]*|null)[,}]' % LOSS.encode())
_WITHOUT_NUMBERS = re.compile(_STEP.pattern + rb' "(?:text|histogram)": ')


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


def read_metrics(path: str | os.PathLike[str], *, max_lines: int | None = None) -> Series:
    """Return the numbers of a run from `metrics.jsonl`.

    Args:
        path: The file; lines that are no JSON object (a cut last line) are passed over, and so are
            values that are no numbers.
        max_lines: About so many lines of training steps are read whole, evenly spread; of the
            others only the loss is, so that a curve of a long run takes seconds. None for all.

    Returns:
        Steps and values per metric, in the order of the file.
    """
    path = pathlib.Path(path)
    stride = 1 if max_lines is None else _stride(path, max_lines)
    series: dict[str, tuple[array.array, array.array]] = {}

    def add(name: str, step: int, value: float) -> None:
        steps, values = series.setdefault(name, (array.array("q"), array.array("d")))
        steps.append(step)
        values.append(value)

    training_lines = 0
    for _, line in read_byte_lines(path):
        if stride > 1 and (head := _TRAINING_LINE.match(line)) is not None:
            training_lines += 1
            if training_lines % stride:
                add(LOSS, int(head[1]), math.nan if head[2] == b"null" else float(head[2]))
                continue
        step, numbers = _numbers(line)
        for name, value in numbers.items():
            add(name, step, value)
    return {name: (np.array(steps), np.array(values)) for name, (steps, values) in series.items()}


def read_last_metrics(path: str | os.PathLike[str]) -> dict[str, float]:
    """Return the latest value of every metric of a run from `metrics.jsonl`.

    Args:
        path: The file. Of the lines of training steps the last 10,000 are read.
    """
    latest: dict[str, float] = {}
    lines: collections.deque[bytes] = collections.deque(maxlen=_LAST_LINES)
    for _, line in read_byte_lines(pathlib.Path(path)):
        lines.append(line)
        if _TRAINING_LINE.match(line) is None:
            latest |= _numbers(line)[1]
    for line in lines:
        latest |= _numbers(line)[1]
    return latest


def _stride(path: pathlib.Path, max_lines: int) -> int:
    """Return the distance of the lines of which about `max_lines` are read.

    Without a factor of 2, 3 or 5: every tenth line may hold what the others do not.
    """
    _, first = next(read_byte_lines(path), (0, b""))
    stride = path.stat().st_size // max(1, len(first) * max_lines)
    return next(n for n in itertools.count(max(1, stride)) if math.gcd(n, 30) == 1)


def _numbers(line: bytes) -> tuple[int, dict[str, float]]:
    """Return the step of a line and its numbers by metric; 0 and none where it has no step."""
    if _WITHOUT_NUMBERS.match(line):
        return 0, {}
    record = parse_line(line) or {}
    step = record.pop("step", None)
    if type(step) is not int or not 0 <= step < 1 << 63:
        return 0, {}
    numbers = {
        name: math.nan if value is None else float(value)
        for name, value in record.items()
        if value is None or type(value) is float or (type(value) is int and abs(value) < 1 << 63)
    }
    return step, numbers


def _end_of(path: pathlib.Path, step: int) -> int:
    """Return the length in bytes of the lines of the first `step` steps, from the last line on."""
    if step <= 0:
        return 0
    for end, line in read_byte_lines_backwards(path):
        head = _STEP.match(line)
        record = {"step": int(head[1])} if head else parse_line(line) or {}
        if type(found := record.get("step")) is int and found <= step:
            return end
    return 0
