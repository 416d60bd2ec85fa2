# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes TensorBoard event files with tensorboardX."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe.disk import DiskGuard
from jaxmoe.optional import require
from jaxmoe.tracking.tracker import Histogram, TrackedRun, Tracker, TrackerBase

DIRECTORY = "tensorboard"
"""Folder of the event files in the run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorBoardConfig(TrackerBase):
    """Event files for `tensorboard --logdir runs`."""

    name: ClassVar[str] = "tensorboard"

    def check(self) -> None:
        """Raise MissingPackageError if tensorboardX is not installed."""
        require("tensorboardX")

    def build(self, run: TrackedRun) -> Tracker:
        """Return the tracker."""
        return TensorBoardTracker(run.directory / DIRECTORY, run.resume_step)


class TensorBoardTracker:
    """Writes scalars, texts, histograms and images for `tensorboard --logdir`.

    Args:
        directory: Of the event files; every start of a run adds one.
        resume_step: The restored step; TensorBoard hides what was logged after it. 0 begins anew.

    Raises:
        MissingPackageError: If tensorboardX is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], resume_step: int = 0):
        self._events = require("tensorboardX.proto.event_pb2")
        self._summary = require("tensorboardX.summary")
        files = require("tensorboardX.event_file_writer")
        os.makedirs(directory, exist_ok=True)
        # The name has whole seconds only: two starts within one must not share a file.
        self._writer = files.EventsWriter(os.path.join(directory, "events"), f".{time.time_ns()}")
        self._guard = DiskGuard(directory)
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(resume_step + 1, session_log=start)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per number."""
        values = []
        for name, number in metrics.items():
            # tensorboardX warns of every number that is not finite; the run does so itself.
            is_finite = math.isfinite(number)
            (value,) = self._summary.scalar(name, float(number) if is_finite else 0.0).value
            value.simple_value = float(number)
            values.append(value)
        self._write(step, summary=self._summary.Summary(value=values))

    def log_text(self, step: int, name: str, text: str) -> None:
        """Write a text as a code block."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._write(step, summary=self._summary.text(name, indented))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Write the histograms; sums are those of the centres of the bins."""
        values = []
        for name, (counts, edges) in histograms.items():
            centers = (edges[1:] + edges[:-1]) / 2.0
            values += self._summary.histogram_raw(
                name,
                min=float(edges[0]),
                max=float(edges[-1]),
                num=float(counts.sum()),
                sum=float(counts @ centers),
                sum_squares=float(counts @ centers**2),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
            ).value
        self._write(step, summary=self._summary.Summary(value=values))

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Write the image, with its caption as the description."""
        summary = self._summary.image(name, pixels, dataformats="HWC")
        summary.value[0].metadata.summary_description = caption
        self._write(step, summary=summary)

    def close(self) -> None:
        """Close the file."""
        with self._guard.warning_once():
            self._writer.close()

    def _write(self, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=int(step), **content)
        with self._guard.warning_once():
            self._writer.write_event(event)
            self._writer.flush()
