# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: numbers, pictures and a page about it.

Trackers take the metrics while the run goes on; the recorder keeps the load of every expert; plots
and report are drawn from the files afterwards. `import jaxmoe.tracking` needs none of the optional
packages: tensorboardX and matplotlib are imported by the parts that use them. Where the files are
is known to `experiments/run_directory.py` alone.
"""

from jaxmoe.tracking.console import ConsoleTracker
from jaxmoe.tracking.jsonl import JsonlTracker, read_metrics
from jaxmoe.tracking.optional import MissingPackageError
from jaxmoe.tracking.plots import plot_run
from jaxmoe.tracking.report import write_report
from jaxmoe.tracking.router_load import RouterLoadRecorder, read_router_load
from jaxmoe.tracking.tensorboard import TensorBoardTracker
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    TOKENS_PER_SECOND,
    CompositeTracker,
    NullTracker,
    Tracker,
)

__all__ = [
    "BITS_PER_BYTE",
    "GRADIENT_NORM",
    "LEARNING_RATE",
    "LOSS",
    "MAX_VIOLATION",
    "TOKENS_PER_SECOND",
    "CompositeTracker",
    "ConsoleTracker",
    "JsonlTracker",
    "MissingPackageError",
    "NullTracker",
    "RouterLoadRecorder",
    "TensorBoardTracker",
    "Tracker",
    "plot_run",
    "read_metrics",
    "read_router_load",
    "write_report",
]
