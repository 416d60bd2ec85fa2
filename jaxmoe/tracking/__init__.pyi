# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
from jaxmoe.catalog import Registry
from jaxmoe.optional import MissingPackageError as MissingPackageError
from jaxmoe.tracking.console import ConsoleTracker as ConsoleTracker
from jaxmoe.tracking.history import RouterLoadRecorder as RouterLoadRecorder
from jaxmoe.tracking.history import read_router_load as read_router_load
from jaxmoe.tracking.jsonl import JsonlTracker as JsonlTracker
from jaxmoe.tracking.jsonl import read_metrics as read_metrics
from jaxmoe.tracking.plots import plot_run as plot_run
from jaxmoe.tracking.report import write_report as write_report
from jaxmoe.tracking.tensorboard import TensorBoardConfig as TensorBoardConfig
from jaxmoe.tracking.tensorboard import TensorBoardTracker as TensorBoardTracker
from jaxmoe.tracking.tracker import BITS_PER_BYTE as BITS_PER_BYTE
from jaxmoe.tracking.tracker import GRADIENT_NORM as GRADIENT_NORM
from jaxmoe.tracking.tracker import LEARNING_RATE as LEARNING_RATE
from jaxmoe.tracking.tracker import LOSS as LOSS
from jaxmoe.tracking.tracker import MAX_VIOLATION as MAX_VIOLATION
from jaxmoe.tracking.tracker import MFU as MFU
from jaxmoe.tracking.tracker import TOKENS_PER_SECOND as TOKENS_PER_SECOND
from jaxmoe.tracking.tracker import CompositeTracker as CompositeTracker
from jaxmoe.tracking.tracker import NullTracker as NullTracker
from jaxmoe.tracking.tracker import TrackedRun as TrackedRun
from jaxmoe.tracking.tracker import Tracker as Tracker
from jaxmoe.tracking.tracker import TrackerBase as TrackerBase
from jaxmoe.tracking.trackio import TrackioConfig as TrackioConfig
from jaxmoe.tracking.wandb import WandbConfig as WandbConfig

TRACKERS: Registry
