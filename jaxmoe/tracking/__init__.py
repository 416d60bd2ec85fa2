# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records a run: trackers, recorders of load and indicators, plots and the report.

Trackers receive the metrics during the run; plots and report are drawn from its files afterwards.
`import jaxmoe.tracking` needs no optional package: tensorboardX, matplotlib and others are imported
by the parts that use them. The paths of the files are defined in `jaxmoe/run/directory.py`.
"""

from jaxmoe.configs import registry_of
from jaxmoe.optional import MissingPackageError
from jaxmoe.tracking.console import ConsoleTracker
from jaxmoe.tracking.jsonl import JsonlTracker, read_metrics
from jaxmoe.tracking.plots import plot_run
from jaxmoe.tracking.report import write_report
from jaxmoe.tracking.router_load import RouterLoadRecorder, read_router_load
from jaxmoe.tracking.tensorboard import TensorBoardConfig, TensorBoardTracker
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    MFU,
    TOKENS_PER_SECOND,
    CompositeTracker,
    NullTracker,
    TrackedRun,
    Tracker,
)
from jaxmoe.tracking.trackio import TrackioConfig
from jaxmoe.tracking.wandb import WandbConfig

TrackerConfig = TensorBoardConfig | WandbConfig | TrackioConfig
"""Trackers beside `metrics.jsonl`, which every run writes."""

TRACKERS = registry_of(TrackerConfig)

__all__ = [
    "BITS_PER_BYTE",
    "GRADIENT_NORM",
    "LEARNING_RATE",
    "LOSS",
    "MAX_VIOLATION",
    "MFU",
    "TOKENS_PER_SECOND",
    "TRACKERS",
    "CompositeTracker",
    "ConsoleTracker",
    "JsonlTracker",
    "MissingPackageError",
    "NullTracker",
    "RouterLoadRecorder",
    "TensorBoardConfig",
    "TensorBoardTracker",
    "TrackedRun",
    "Tracker",
    "TrackerConfig",
    "TrackioConfig",
    "WandbConfig",
    "plot_run",
    "read_metrics",
    "read_router_load",
    "write_report",
]
