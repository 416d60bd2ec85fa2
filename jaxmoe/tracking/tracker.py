# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of trackers, two trivial ones, and the names of metrics.

A tracker takes what the training loop has computed anyway. It never decides anything, and on
several processes only the first one has trackers (the others have a `NullTracker`).

To add a tracker: a file beside this one with a class of these methods and its config (`name`,
`check`, `build`), which extends `TrackerBase`, and its row under `tracker` in
`jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

# The metrics that the console line, the plots and the report know; any others may be logged.
LOSS = "train/loss"
"""Cross-entropy of the training batch, nats per token."""
LEARNING_RATE = "train/learning_rate"
"""Learning rate of the hidden matrices in the step, their multiplier included."""
REFUSED_STEPS = "train/refused_steps"
"""Steps that the guard has refused so far; logged from the first of them on."""
GRADIENT_NORM = "train/grad_norm"
"""Norm of all gradients before clipping."""
BITS_PER_BYTE = "eval/bits_per_byte"
"""Cross-entropy of the held-out text, bits per byte."""
BITS_PER_TOKEN = "eval/bits_per_token"
"""Cross-entropy of the held-out data, bits per token."""
TOKENS_PER_SECOND = "perf/tokens_per_second"
"""Tokens without padding per second of wall time, all devices together, whatever their weight in
the loss; of answers that a run draws itself, those with a weight."""
MFU = "perf/mfu"
"""Model FLOPs utilisation, a fraction of 1; see `jaxmoe/training/measures/throughput.py`."""
TRAINED_TOKENS = "progress/tokens"
"""Tokens of all steps so far."""
TRAINED_SECONDS = "progress/seconds"
"""Seconds of all steps so far, every start of the run together; compiling, evaluating and saving
left out."""
MAX_VIOLATION = "router/max_violation"
"""Largest load of an expert over the fair load, minus 1, in the worst layer."""
ROUTER_ENTROPY = "router/router_entropy"
"""Mean over tokens and layers of the entropy of the router's probabilities, over log E."""
LOAD_ENTROPY = "router/load_entropy"
"""Mean over layers of the entropy of the load, over log E; 1 is balanced."""
LOAD_BALANCE = "router/load_balance"
"""Load-balancing loss, unweighted, mean over layers; 1.0 for a uniform router."""
DEAD_FRACTION = "router/dead_fraction"
"""Share of the experts that no token of the batch was sent to."""
DROPPED_FRACTION = "router/dropped_fraction"
"""Share of the assignments that were dropped for lack of capacity."""
REWARD = "rl/reward"
"""Mean reward of the answers of a step of reinforcement learning."""
SOLVED = "rl/solved"
"""Share of the answers with a reward of 1."""
DIVERGENCE = "rl/kl"
"""Divergence of the policy per token, nats: from the initial model with beta, from the program that
drew the answers without."""
CLIPPED = "rl/clipped"
"""Share of the answers' tokens whose probability differs by more than the clip range from the one
that they were drawn with."""
ANSWER_LENGTH = "rl/length"
"""Mean tokens of an answer."""
REPLAYED = "rl/replayed"
"""Share of the tokens that are trained with the experts of the engine."""
STALE = "rl/stale"
"""Steps that the answers lag behind the parameters that they train."""
AHEAD = "rl/ahead"
"""Prompts of later steps that answers are drawn to while a step is trained."""
DROPPED = "rl/dropped"
"""Prompts whose answers became too old to train on, since the start."""
SYNC_SHARE = "rl/sync"
"""Share of the bytes of the parameters that the engine was sent for the answers of a step."""
SYNC_BYTES = "rl/sync_bytes"
"""Bytes that it was sent."""
ROLLOUT_SECONDS = "rl/rollout_s"
"""Seconds of a step for its answers."""
TRAIN_SECONDS = "rl/train_s"
"""Seconds of a step for the rest."""


Histogram = tuple[np.ndarray, np.ndarray]
"""Counts [bins] and edges [bins + 1], as `numpy.histogram` returns them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Facts about a run that trackers receive."""

    name: str
    directory: pathlib.Path
    """Run directory; a tracker keeps its files below it."""
    config: Mapping[str, Any]
    """The resolved config, as JSON."""
    resume_step: int = 0
    """The restored step; 0 for a new run."""

    @property
    def id(self) -> str:
        """Short id, the same for every start in one directory."""
        return hashlib.sha256(str(self.directory.resolve()).encode()).hexdigest()[:16]


@runtime_checkable
class Tracker(Protocol):
    """Destination of metrics and texts."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record numbers.

        Args:
            step: Optimiser steps done.
            metrics: Numbers by name, such as `{LOSS: 3.2}`.
        """
        ...

    def log_text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a sample of the model.

        Args:
            step: Optimiser steps done.
            name: What it is.
            text: The text.
        """
        ...

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Record distributions.

        Args:
            step: Optimiser steps done.
            histograms: Counts and edges by name.
        """
        ...

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Record a picture; trackers without pictures do nothing.

        Args:
            step: Optimiser steps done.
            name: Name of the picture.
            pixels: [H W 3] uint8.
            caption: How to read it.
        """
        ...

    def close(self) -> None:
        """Write what is pending; nothing is logged afterwards."""
        ...


class NullTracker:
    """Records nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """Do nothing."""

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Do nothing."""

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class CompositeTracker:
    """Passes everything to several trackers.

    Args:
        trackers: In the order in which they are called.
    """

    def __init__(self, *trackers: Tracker):
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log to each tracker."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_text(self, step: int, name: str, text: str) -> None:
        """Log to each tracker."""
        for tracker in self._trackers:
            tracker.log_text(step, name, text)

    def log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log to each tracker."""
        for tracker in self._trackers:
            tracker.log_histograms(step, histograms)

    def log_image(self, step: int, name: str, pixels: np.ndarray, caption: str) -> None:
        """Log to each tracker."""
        for tracker in self._trackers:
            tracker.log_image(step, name, pixels, caption)

    def close(self) -> None:
        """Close each tracker."""
        for tracker in self._trackers:
            tracker.close()


class TrackerBase(abc.ABC):
    """Base class of the configs of trackers."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise if the tracker cannot be made.

        Raises:
            MissingPackageError: A package that it needs is not installed.
        """

    @abc.abstractmethod
    def build(self, run: TrackedRun) -> Tracker:
        """Return the tracker.

        Args:
            run: Directory, names and configuration of the run.
        """
