# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Reporter`: passes the metrics of a run to console, files and trackers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jaxmoe.configs import to_json
from jaxmoe.optional import require
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig, TrackingConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.history import RouterLoadRecorder, load_metrics
from jaxmoe.tracking.jsonl import JsonlTracker, read_last_metrics
from jaxmoe.tracking.load_map import LOAD_IMAGE_CAPTION, LOAD_IMAGE_RECORDS, load_image
from jaxmoe.tracking.terminal import Console, LiveTracker, SilentConsole, open_console
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS,
    MAX_VIOLATION,
    MFU,
    REFUSED_STEPS,
    TOKENS_PER_SECOND,
    TRAINED_SECONDS,
    TRAINED_TOKENS,
    CompositeTracker,
    NullTracker,
    TrackedRun,
    Tracker,
)
from jaxmoe.training.evaluate import Evaluation
from jaxmoe.training.loop import Report, Status
from jaxmoe.training.measures.throughput import model_flops_utilization
from jaxmoe.training.metrics import StepMetrics, fetch_metrics
from jaxmoe.training.parts.worker_losses import loss_scalars


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One optimiser step of `Run.steps`."""

    step: int
    """Number of the step, from 1."""
    metrics: StepMetrics
    """Metrics on the devices; reading a value waits until the step is computed."""

    @property
    def loss(self) -> float:
        """Cross-entropy in nats per token."""
        return float(fetch_metrics([self.metrics])[0].loss)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a call of `Run.train` ended."""

    status: Status
    """done; preempted or interrupted (saved, can be resumed); or why it ended early."""
    step: int
    """Number of steps trained, over all starts."""
    checkpoint_step: int | None
    """Step of the newest checkpoint; None without one."""
    message: str = ""
    """Cause of an end that is an error, in one sentence; empty otherwise."""
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Content of summary.json; empty on all processes but the first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateResult:
    """Held-out loss of one checkpoint."""

    step: int
    """Step of the checkpoint."""
    num_tokens: int
    """Number of predicted tokens."""
    bits_per_token: float
    """Mean held-out loss in bits per token, as `eval/bits_per_token` in metrics.jsonl."""
    bits_per_byte: float | None
    """The same per byte of text; None for data without bytes."""
    precision: str = ""
    """Formats of quantised weights and cache; empty without any."""


def check_packages(tracking: TrackingConfig) -> None:
    """Check that the packages of all trackers are installed.

    Args:
        tracking: Trackers and console of a run.

    Raises:
        MissingPackageError: One is not; names the extra that installs it.
    """
    for tracker in tracking.trackers:
        tracker.check()
    if tracking.console == "rich":
        require("rich")


@runtime_checkable
class StepRecorder(Protocol):
    """Records steps by their metrics, on the first process; see `Reporter.add_recorder`."""

    def step_numbers(self, step: int, metrics: StepMetrics) -> Mapping[str, float]:
        """Return numbers to log with a step.

        Args:
            step: Number of the step.
            metrics: Its metrics, on the host.
        """
        ...

    def flush(self) -> None:
        """Write the records of the steps so far: before the state is saved, and at the end."""
        ...


class Reporter:
    """Receives the metrics of the loop and passes them on; only the first process writes.

    Args:
        name: Name of the run.
        directory: Run directory.
        assembly: Plan and data of the run, for the schedule and the units.
        first_step: Number of steps already done; records of later ones are dropped.

    Raises:
        MissingPackageError: The package of a tracker is not installed.
        ValueError: A tracker cannot start.
    """

    def __init__(
        self,
        name: str,
        directory: RunDirectory,
        assembly: Assembly,
        first_step: int,
    ):
        plan = assembly.plan
        training = assembly.plan.config.training
        self._name = name
        self._directory = directory
        self._assembly = assembly
        self._recorders: list[StepRecorder] = []
        self.skipped = 0
        """Number of steps refused by the guard in this start."""
        self._has_explained = False
        self.flops_per_token = plan.flops_per_token
        """Model FLOPs of a training step per token."""
        self._seconds = self._tokens = 0.0
        self._training = training
        # Computed once: calling the schedule at every step would wait for the device.
        steps = np.arange(training.steps, dtype=np.int32)
        factors = jax.vmap(plan.schedule)(jax.numpy.asarray(steps))
        self._learning_rates = plan.matrix_rate * np.asarray(factors, np.float64)
        self._open(first_step)

    def _open(self, first_step: int) -> None:
        """Open console and files with the records up to a step."""
        config = self._assembly.plan.config
        self._files: Tracker = NullTracker()
        self._console: Console = SilentConsole()
        self._loads: RouterLoadRecorder | None = None
        self.last: dict[str, float] = {}
        """Latest value of every metric, over all starts."""
        if jax.process_index() == 0:
            directory = self._directory
            run = TrackedRun(
                name=self._name,
                directory=directory.path,
                config=to_json(config),
                resume_step=first_step,
            )
            self._console = open_console(config.tracking.console, self._training.steps)
            trackers: list[Tracker] = [tracker.build(run) for tracker in config.tracking.trackers]
            record = JsonlTracker(directory.metrics_file, first_step)
            self._files = CompositeTracker(record, *trackers)
            self._loads = RouterLoadRecorder(directory.router_file, first_step)
            if first_step:
                self.last = read_last_metrics(directory.metrics_file)
        self._trained_seconds = self.last.get(TRAINED_SECONDS, 0.0)
        self._refused_steps = int(self.last.get(REFUSED_STEPS, 0.0))
        self._is_closed = False
        self._first_step = first_step

    def go_back(self, step: int) -> None:
        """Continue after an earlier step; records of later ones are dropped."""
        self.close()
        self._open(step)

    def add_recorder(self, recorder: StepRecorder) -> None:
        """Let a part of the run record steps too, from its `begin` on.

        Args:
            recorder: The part; further calls with it do nothing.
        """
        if recorder not in self._recorders:
            self._recorders.append(recorder)

    def on_mesh(self, assembly: Assembly) -> None:
        """Go on with the devices of another mesh, from which the mean speed is counted again.

        Args:
            assembly: Plan, devices and data of the steps that follow.
        """
        self._assembly = assembly
        self._seconds = self._tokens = 0.0

    @property
    def is_live(self) -> bool:
        """Whether the console is a live view, which needs metrics about once a second."""
        return isinstance(self._console, LiveTracker)

    def start(self) -> None:
        """Start the console; called before the first step."""
        self._console.start(self._first_step)

    def log_steps(self, report: Report) -> None:
        """Log the metrics of consecutive training steps."""
        self._seconds += report.seconds
        self._tokens += report.num_tokens
        load = None
        for step, metrics in zip(report.steps, report.metrics, strict=True):
            self._trained_seconds += report.seconds / len(report.steps)
            values = self._values(step, metrics)
            if step == report.steps[-1]:
                values[TOKENS_PER_SECOND] = report.tokens_per_second
                if (mfu := self._utilization(report.tokens_per_second)) is not None:
                    values[MFU] = mfu
            self.skipped += bool(metrics.is_skipped)
            self._refused_steps += bool(metrics.is_skipped)
            if self._refused_steps:
                values[REFUSED_STEPS] = float(self._refused_steps)
            if self._loads is not None:
                for recorder in self._recorders:
                    values |= recorder.step_numbers(step, metrics)
            self.last.update(values)
            if self._loads is not None and metrics.load is not None:
                load = np.asarray(metrics.load)
                self._loads.record(step, load)
                values |= self._log_load(step, load, self._loads)
            self._files.log(step, values)
        for refused in _refused_in_a_row(report, self._training.step_guard.max_skipped):
            step = refused[0][0]
            self._console.log_text(step, "warning", _skip_text(refused))
            if not self._has_explained:
                config = self._assembly.plan.config
                self._console.log_text(step, "note", _skip_explanation(config))
                self._has_explained = True
        self._console.show({}, load)
        self._console.log(report.steps[-1], self.last)

    def _log_load(
        self, step: int, load: np.ndarray, recorder: RouterLoadRecorder
    ) -> dict[str, float]:
        """Return the numbers of layers and experts; log histograms and the picture at intervals."""
        config = self._assembly.plan.config
        is_last = step == self._training.steps
        every = config.evaluation.every
        if is_last or (every and step % every == 0):
            steps, series = recorder.sample(LOAD_IMAGE_RECORDS)
            picture = load_image(steps, series["load"])
            self._files.log_image(step, "router/load_map", picture, LOAD_IMAGE_CAPTION)
        if not is_last and step % config.tracking.print_every:
            return {}
        scalars, histograms = load_metrics(load)
        if histograms:
            self._files.log_histograms(step, histograms)
        return scalars

    def log_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Log a held-out loss."""
        values = {BITS_PER_TOKEN: evaluation.bits_per_token}
        if self._assembly.source.bytes_per_token is not None:
            values[BITS_PER_BYTE] = (
                evaluation.bits_per_token / self._assembly.source.bytes_per_token
            )
        self.last.update(values)
        self._files.log(step, values)
        self._console.show(values)
        labels = {BITS_PER_TOKEN: "bits per token", BITS_PER_BYTE: "bits per byte"}
        shown = ", ".join(f"{value:.4f} {labels[name]}" for name, value in values.items())
        self._console.log_text(step, "held out", shown)

    def log_numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Log further numbers of a step."""
        self.last.update(values)
        self._files.log(step, values)

    def warn(self, step: int, text: str) -> None:
        """Print a warning on the console."""
        self._console.log_text(step, "warning", text)

    def flush(self) -> None:
        """Write the records of the steps so far; called before they are saved."""
        if self._loads is not None:
            self._loads.save()
            for recorder in self._recorders:
                recorder.flush()

    def abandon(self) -> None:
        """Close without writing to files that another process holds by now."""
        self._loads = None
        self.close()

    def close(self) -> None:
        """Close trackers and console; further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._console.close()
        self.flush()
        self._files.close()

    @property
    def tokens_per_second(self) -> float:
        """Mean over this start, on its last mesh, without evaluation and saving."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def mfu(self) -> float | None:
        """Mean model FLOPs utilisation over the same steps; None on devices of unknown peak."""
        return self._utilization(self.tokens_per_second)

    @property
    def trained_seconds(self) -> float:
        """Training time of all steps so far, over all starts."""
        return self._trained_seconds

    def _utilization(self, tokens_per_second: float) -> float | None:
        dtype = self._assembly.execution.precision.compute_dtype.name
        devices = list(self._assembly.mesh.devices.flat)
        return model_flops_utilization(tokens_per_second, self.flops_per_token, devices, dtype)

    def _values(self, step: int, metrics: StepMetrics) -> dict[str, float]:
        """Return the metrics of one step by the trackers' names."""
        router: Mapping[str, float] = {
            f"router/{name}": float(value) for name, value in metrics.router.items()
        }
        losses = {f"train/{name}": float(value) for name, value in metrics.losses.items()}
        worst = router.get("router/max_violation_worst")
        return {
            LOSS: float(metrics.loss),
            # The optimiser has not counted the steps that were refused.
            LEARNING_RATE: float(self._learning_rates[step - 1 - self._refused_steps]),
            GRADIENT_NORM: float(metrics.grad_norm),
            **losses,
            **router,
            **({} if worst is None else {MAX_VIOLATION: worst}),
            TRAINED_TOKENS: float(self._training.tokens_before(step)),
            **({} if metrics.worker_loss is None else loss_scalars(metrics.worker_loss)),
            **{f"replicas/{name}": float(value) for name, value in metrics.exchange.items()},
            **{f"levels/{name}": float(value) for name, value in metrics.levels.items()},
            **{f"disk/{name}": float(value) for name, value in metrics.disk.items()},
            TRAINED_SECONDS: self._trained_seconds,
        }


def _refused_in_a_row(report: Report, most: int) -> list[list[tuple[int, StepMetrics]]]:
    """Return the steps of a report that were refused, grouped by neighbours.

    Args:
        report: Metrics of consecutive steps.
        most: Refused steps in a row that end the run; those that follow are left out.
    """
    groups: list[list[tuple[int, StepMetrics]]] = []
    for step, metrics in zip(report.steps, report.metrics, strict=True):
        if not bool(metrics.is_skipped) or int(metrics.skipped_in_a_row) > most:
            continue
        if groups and groups[-1][-1][0] == step - 1:
            groups[-1].append((step, metrics))
        else:
            groups.append([(step, metrics)])
    return groups


def _skip_text(refused: list[tuple[int, StepMetrics]]) -> str:
    """Return the message about refused steps, with the cause of the first."""
    (first, metrics), (last, latest) = refused[0], refused[-1]
    loss = float(metrics.loss)
    norm = float(metrics.grad_norm if metrics.judged_norm is None else metrics.judged_norm)
    limit = math.inf if metrics.norm_limit is None else float(metrics.norm_limit)
    cause = "loss" if not math.isfinite(loss) else "gradient norm or new state"
    cause = f"the {cause} is not finite"
    if math.isfinite(loss) and limit < norm < math.inf:
        cause = f"the gradient norm is above {limit:g}, the bound that recent steps set"
    which = "this step" if first == last else f"steps {first} to {last}"
    return (
        f"{cause} (loss {loss:g}, gradient norm {norm:g}); {which} changed"
        f" nothing ({int(latest.skipped_in_a_row)} in a row)"
    )


def _skip_explanation(config: PretrainConfig) -> str:
    """Return what refused steps are and what to do, for someone who has not met one."""
    guard = config.training.step_guard
    sentences = [
        "A step is refused when one batch would change the model far more than the batches before"
        " it, or to numbers that are not finite. The batch is left out and training goes on."
        " One refused step now and then needs nothing."
    ]
    if guard.max_norm_ratio is not None:
        sentences.append(
            f"The bound is training.guard.max_norm_ratio={guard.max_norm_ratio:g} times the median"
            " gradient norm of the last steps; None has no bound."
        )
    after = "goes back to a checkpoint" if guard.rollbacks else "ends"
    sentences.append(
        f"After training.guard.max_skipped={guard.max_skipped} in a row the run {after}."
        f" If it happens often, lower optimizer.learning_rate={config.optimizer.learning_rate:g},"
        " or lengthen schedule.warmup_steps."
    )
    return "\n".join(sentences)
