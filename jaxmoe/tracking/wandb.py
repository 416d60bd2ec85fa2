# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Metrics for Weights & Biases: `--tracking.trackers tensorboard wandb`.

Optional (`pip install 'jaxmoe[wandb]'`). Every record carries its own `step`, which is the axis of
all charts: W&B's internal step may only rise, so that what a run logs again after a restart would
be lost. A resumed run finds its page by an id made from its directory.

It does not upload files; those are in the run directory.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from jaxmoe.optional import require
from jaxmoe.tracking.tracker import Histogram, TrackedRun, Tracker, TrackerBase


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WandbConfig(TrackerBase):
    """Weights & Biases; the key comes from `wandb login` or WANDB_API_KEY."""

    name: ClassVar[str] = "wandb"

    project: str = "jaxmoe"
    """Name of the project."""
    entity: str | None = None
    """User or team; the account's default when None."""
    mode: Literal["online", "offline"] = "online"
    """offline: only files under the run directory, for a later `wandb sync`."""

    def __post_init__(self):
        if not self.project:
            raise ValueError("trackers.wandb.project='' must be a name")

    def check(self) -> None:
        """Raise MissingPackageError if wandb is not installed."""
        require("wandb", "wandb")

    def build(self, run: TrackedRun) -> Tracker:
        """Start the run, or continue it."""
        wandb = require("wandb", "wandb")
        run.directory.mkdir(parents=True, exist_ok=True)
        try:
            started = wandb.init(
                project=self.project,
                entity=self.entity,
                name=run.name,
                id=run.id,
                resume="allow",
                dir=str(run.directory),
                config=dict(run.config),
                mode=self.mode,
                # The terminal is ours: its output is not captured, and no banner is printed.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ValueError(
                f"trackers.wandb: {error}\nlog in with `wandb login`, or set its mode to offline"
            ) from error
        started.define_metric("step")
        started.define_metric("*", step_metric="step")
        return WandbTracker(wandb, started)


class WandbTracker:
    """Passes numbers, texts, histograms and images to Weights & Biases."""

    def __init__(self, wandb: Any, run: Any):
        self._wandb = wandb
        self._run = run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one record."""
        self._run.log({"step": int(step)} | {name: float(v) for name, v in metrics.items()})

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log the text as an HTML page."""
        page = self._wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._run.log({"step": int(step), name: page})

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add one record of histograms."""
        made = {name: self._wandb.Histogram(np_histogram=h) for name, h in histograms.items()}
        self._run.log({"step": int(step)} | made)

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Log the image with its caption."""
        self._run.log({"step": int(step), name: self._wandb.Image(pixels, caption=caption)})

    def close(self) -> None:
        """End the run, after sending what is pending."""
        self._run.finish()
