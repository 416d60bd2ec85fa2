# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics for Trackio, a local dashboard: `--tracking.trackers trackio`, then `trackio show`.

Optional (`pip install 'jaxmoe[trackio]'`). Trackio keeps a database of its own, outside of the run
directory (`TRACKIO_DIR`, by default in the Hugging Face cache), and needs no account. A resumed run
logs its steps again; Trackio shows the later ones beside the earlier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmoe.optional import require
from jaxmoe.tracking.tracker import Histogram, TrackedRun, Tracker, TrackerBase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrackioConfig(TrackerBase):
    """Trackio, on this machine or in a Hugging Face space."""

    name: ClassVar[str] = "trackio"

    project: str = "jaxmoe"
    """Name of the project."""
    space: str | None = None
    """Hugging Face space of the dashboard, as user/name; None for this machine."""

    def __post_init__(self):
        if not self.project:
            raise ValueError("trackers.trackio.project='' must be a name")

    def check(self) -> None:
        """Raise MissingPackageError if trackio is not installed."""
        require("trackio", "trackio")

    def build(self, run: TrackedRun) -> Tracker:
        """Start the run, or continue it."""
        trackio = require("trackio", "trackio")
        started = trackio.init(
            project=self.project,
            name=f"{run.name}-{run.id[:6]}",  # its only key: two runs may share a name
            space_id=self.space,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        return TrackioTracker(trackio, started)


class TrackioTracker:
    """Passes numbers, texts, histograms and images to Trackio."""

    def __init__(self, trackio: Any, run: Any):
        self._trackio = trackio
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one record."""
        self._run.log({name: float(v) for name, v in metrics.items()}, step=int(step))

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log the text as a code block."""
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=int(step))

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add one record of histograms."""
        made = {name: self._trackio.Histogram(np_histogram=h) for name, h in histograms.items()}
        self._run.log(made, step=int(step))

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Log the image with its caption."""
        self._run.log({name: self._trackio.Image(pixels, caption=caption)}, step=int(step))

    def close(self) -> None:
        """End the run, after writing what is pending."""
        self._run.finish()
