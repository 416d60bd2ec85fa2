# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trials of a study: the loop over a trial's batches, and a file of finished trials.

The record of a trial is a line of trials.jsonl, on disk before the next trial begins.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from experiments.studies.programs import StudyPrograms
from experiments.studies.study import check_stop
from jaxmoe.data import Batch
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.config import TrainingConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics

logger = logging.getLogger(__name__)

Record = dict[str, Any]

TRIAL_ERRORS: Final = (ValueError, TypeError, ArithmeticError, RuntimeError)
"""Errors that end one trial of a study; the last three are JAX's."""


def error_record(name: str, error: Exception) -> Record:
    """Return status and reason of a trial that an error has ended.

    Args:
        name: Name of the trial.
        error: One of `TRIAL_ERRORS`, while it is handled.
    """
    if isinstance(error, ValueError):
        return {"status": "refused", "reason": str(error)}
    logger.debug("%s failed", name, exc_info=True)
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def train(
    programs: StudyPrograms, key: Array, batches: Iterable[Batch], stop: StopRequest
) -> tuple[TrainState, list[StepMetrics]]:
    """Train a new state on batches.

    Args:
        programs: Compiled programs of the model.
        key: Key of the initial values.
        batches: One batch per step.
        stop: Checked before every step.

    Returns:
        The last state, and the metrics of every step on the host.

    Raises:
        StoppedError: A signal arrived.
    """
    state = programs.init(key)
    metrics = []
    for batch in batches:
        check_stop(stop)
        state, measured = programs.step(state, batch)
        metrics.append(measured)
    return state, jax.device_get(metrics)


def has_diverged(skipped_in_a_row: Any, training: TrainingConfig) -> bool:
    """Return whether so many steps in a row were refused that a run would have stopped.

    Args:
        skipped_in_a_row: Counter after every step.
        training: Steps, and the refused steps after which a run stops.
    """
    longest = int(np.max(np.asarray(skipped_in_a_row)))
    return longest >= min(training.step_guard.max_skipped, training.steps)


def on_device(batch: Batch) -> Batch:
    """Return a batch as JAX arrays."""
    return jax.tree.map(jnp.asarray, batch)


class TrialsFile:
    """Records of finished trials, one JSON object per line.

    Args:
        path: Path of the file; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and wait until it is on disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self, data: str) -> Iterator[Record]:
        """Yield the records in order; a truncated last line is removed from the file.

        Args:
            data: Digest of the data that every record must carry.

        Raises:
            ValueError: A record carries another digest.
        """
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines.pop():
            self.path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for record in map(json.loads, lines):
            if record["data"] != data:
                raise ValueError(
                    f"{self.path} holds trials on other data (another Python has another library,"
                    " whose source is the corpus): choose another directory with --run.directory"
                )
            yield record


def finite(value: Any) -> float | None:
    """Return a float for JSON; None when it is missing or not finite."""
    return float(value) if value is not None and math.isfinite(value) else None
