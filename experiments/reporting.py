# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""From a run's metrics to its trackers: the progress line, the files, the last numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import numpy as np

from experiments.assembly import Assembly
from experiments.run_directory import RunDirectory
from jaxmoe.tracking.console import ConsoleTracker
from jaxmoe.tracking.jsonl import JsonlTracker
from jaxmoe.tracking.router_load import RouterLoadRecorder
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
from jaxmoe.training.evaluate import Evaluation
from jaxmoe.training.loop import Report
from jaxmoe.training.step import StepMetrics

BITS_PER_TOKEN = "eval/bits_per_token"


class Reporter:
    """Receives what the loop reports and passes it on; only the first process writes.

    Args:
        directory: of the run.
        assembly: for the schedule and the data's units.
        first_step: restored; records after it are dropped.
    """

    def __init__(self, directory: RunDirectory, assembly: Assembly, first_step: int):
        config = assembly.plan.config
        self._assembly = assembly
        self._is_first_process = jax.process_index() == 0
        self._files = self._console = NullTracker()
        self._loads: RouterLoadRecorder | None = None
        if self._is_first_process:
            trackers: list[Tracker] = [JsonlTracker(directory.metrics_file, first_step)]
            if config.tracking.has_tensorboard:
                trackers.append(TensorBoardTracker(directory.tensorboard_directory, first_step))
            self._files = CompositeTracker(*trackers)
            self._console = ConsoleTracker(config.training.steps)
            self._loads = RouterLoadRecorder(directory.router_file, first_step)
        self.last: dict[str, float] = {}
        """Latest value of every metric."""
        self.skipped = 0
        """Steps refused by the guard since this start."""
        self._seconds = self._tokens = 0.0

    def trained(self, report: Report) -> None:
        """Metrics of consecutive training steps."""
        self._seconds += report.seconds
        self._tokens += sum(float(metrics.num_tokens) for metrics in report.metrics)
        for step, metrics in zip(report.steps, report.metrics, strict=True):
            values = self._values(step, metrics)
            if step == report.steps[-1]:
                values[TOKENS_PER_SECOND] = report.tokens_per_second
            if bool(metrics.is_skipped):
                self.skipped += 1
                self._console.log_text(step, "warning", _skip_text(metrics))
            self.last.update(values)
            self._files.log(step, values)
            if self._loads is not None and metrics.load is not None:
                self._loads.record(step, np.asarray(metrics.load))
        self._console.log(report.steps[-1], self.last)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """A held-out loss."""
        values = {BITS_PER_TOKEN: evaluation.bits_per_token}
        if self._assembly.source.bytes_per_token is not None:
            values[BITS_PER_BYTE] = (
                evaluation.bits_per_token / self._assembly.source.bytes_per_token
            )
        self.last.update(values)
        self._files.log(step, values)
        shown = " ".join(f"{name}={value:.4f}" for name, value in values.items())
        self._console.log_text(step, "held out", shown)

    def flush(self) -> None:
        """Writes what belongs to the steps so far, before they are saved."""
        if self._loads is not None:
            self._loads.save()

    def close(self) -> None:
        """Ends the trackers."""
        self.flush()
        self._files.close()
        self._console.close()

    @property
    def tokens_per_second(self) -> float:
        """Mean over this start, evaluation and saving left out."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def _values(self, step: int, metrics: StepMetrics) -> dict[str, float]:
        """One step's metrics by the trackers' names."""
        plan = self._assembly.plan
        factor = float(plan.schedule(jax.numpy.int32(step - 1)))
        router: Mapping[str, float] = {
            f"router/{name}": float(value) for name, value in metrics.router.items()
        }
        losses = {f"train/{name}": float(value) for name, value in metrics.losses.items()}
        worst = router.get("router/max_violation_worst")
        return {
            LOSS: float(metrics.loss),
            LEARNING_RATE: plan.config.optimizer.learning_rate * factor,
            GRADIENT_NORM: float(metrics.grad_norm),
            **losses,
            **router,
            **({} if worst is None else {MAX_VIOLATION: worst}),
        }


def _skip_text(metrics: StepMetrics) -> str:
    loss, norm = float(metrics.loss), float(metrics.grad_norm)
    cause = "loss" if not math.isfinite(loss) else "gradient norm or new state"
    return (
        f"the {cause} is not finite (loss {loss:g}, gradient norm {norm:g}); this step changed"
        f" nothing ({int(metrics.skipped_in_a_row)} in a row)"
    )
