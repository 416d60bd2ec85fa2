# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Loop`: the steps that are taken on the batches of a feed.

Metrics stay on the device and are fetched every `report_every` steps, before a hook runs, and at
the end, so that the host runs ahead of the device. The time of hooks is not training time.

`jaxmoe.run.trainer` makes a loop, takes its steps, and decides what follows its end. A loop asks
its feed (`jaxmoe/training/feed.py`) for batches in the order of the steps.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, cast, runtime_checkable

import jax

from jaxmoe.data import Batch
from jaxmoe.errors import EndRunError
from jaxmoe.training.feed import Feed, StepFunction
from jaxmoe.training.hooks import Hook
from jaxmoe.training.metrics import fetch_metrics
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from jaxmoe.training.stopwatch import DATA, DISPATCH, HOOKS, REPORT, WAIT, Stopwatch

logger = logging.getLogger(__name__)

Status = Literal[
    "done",
    "preempted",
    "interrupted",
    "diverged",
    "corrupted",
    "taken_over",
    "not_saved",
    "resized",
]
"""How a loop ended. After "resized" the run goes on with another loop, on another mesh."""

StopReason = Literal["preempted", "interrupted", "taken_over", "resized"]


@runtime_checkable
class Stop(Protocol):
    """A request to end the loop early, such as `jaxmoe.resilience.stop.StopRequest`."""

    def steps_begin(self) -> None:
        """Called once, before the first step."""
        ...

    def agree(self) -> StopReason | None:
        """Return the reason to stop, the same on all processes; each asks at the same step."""
        ...


@runtime_checkable
class PositionCounter(Protocol):
    """A feed that counts the positions of its batches; of others the loss weights are counted."""

    def positions(self, batch: Batch) -> int:
        """Return the positions of a batch without padding, after the step on it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Metrics of consecutive steps, on the host."""

    steps: tuple[int, ...]
    metrics: tuple[StepMetrics, ...]
    seconds: float
    """Training time of these steps."""
    positions: float | None = None
    """Positions of their batches without padding; None where steps make their rows themselves."""

    @property
    def num_tokens(self) -> float:
        """Tokens that were computed, whatever their weights: `positions`, else the loss weights."""
        if self.positions is not None:
            return self.positions
        return sum(float(metrics.num_tokens) for metrics in self.metrics)

    @property
    def tokens_per_second(self) -> float:
        """Training throughput of these steps."""
        return self.num_tokens / max(self.seconds, 1e-9)


_LAG = 2
"""Steps after which the loop reads whether a step was refused; the device stays busy meanwhile."""


class Loop:
    """Takes training steps until the last one, a request to stop, or steps that must not go on.

        while loop.status is None:
            metrics = loop.advance()

    Args:
        state: Initial state, donated.
        step_function: Step of the run, which the session of the feed returned.
        feed: Batches; its session is open.
        first_step: Steps already done.
        last_step: Total number of steps.
        hooks: Hooks in the order in which they run after a step.
        report: Called with the metrics.
        report_every: Steps between reports.
        max_skipped: Steps refused in a row that end the loop.
        stop: Request to stop, checked every step; with several processes every `report_every`.
        publish: Brings the parameters that the world sees up to date.
        stopwatch: Receives the time of the loop by kind; None to count it nowhere.
        beat: Called with an activity and its step when it begins.
    """

    def __init__(
        self,
        state: TrainState,
        step_function: StepFunction,
        feed: Feed,
        *,
        first_step: int,
        last_step: int,
        hooks: Sequence[Hook],
        report: Callable[[Report], None],
        report_every: int,
        max_skipped: int,
        stop: Stop,
        publish: Callable[[TrainState], TrainState] = lambda state: state,
        stopwatch: Stopwatch | None = None,
        beat: Callable[[str, int], None] = lambda what, step: None,
    ):
        self._step_function = step_function
        self._feed = feed
        self._batches = feed.batches(first_step)
        self._last_step = last_step
        self._hooks = hooks
        self._report_every = report_every
        self._stop = stop
        self._publish = publish
        self._stopwatch = stopwatch or Stopwatch()
        self._beat = beat
        self._asks_alone = jax.process_count() == 1  # several must agree, which costs a collective
        self.state = state
        """State after the steps done; donated by a step that failed."""
        self.step = first_step
        """Number of steps done."""
        self.status: Status | None = None
        """How the loop ended; None before."""
        self.refused: tuple[int, int] | None = None
        """First and last of the steps refused in a row that ended a diverged loop. Later steps,
        which it may have done before it fetched the metrics, are not counted."""
        stop.steps_begin()
        self._pending = _PendingMetrics(self._stopwatch, report, beat, max_skipped)
        if first_step >= last_step:
            self.status = "done"

    def advance(self) -> StepMetrics | None:
        """Take a step and run its hooks.

        Returns:
            Its metrics, on the devices; None if the loop has ended, by this step or before.
        """
        if self.status is not None:
            return None
        self._beat("batch", self.step + 1)
        with self._stopwatch.on(DATA):
            batch = next(self._batches)
        metrics = self._take_step(batch)
        if metrics is None:
            return None
        pending = self._pending
        feed = self._feed
        positions = feed.positions(batch) if isinstance(feed, PositionCounter) else None
        is_over = pending.add(self.step, metrics, positions) or self.step == self._last_step
        asks = self._asks_alone or self.step % self._report_every == 0
        with self._stopwatch.on(WAIT):  # hooks and signals may need a collective
            due = [hook for hook in self._hooks if hook.is_due(self.step)]
            reason = self._stop.agree() if asks else None
        if reason == "taken_over":  # another process owns the files
            self.status = reason
            return None
        is_reported = self.step % self._report_every == 0
        is_shared = is_over or bool(reason) or is_reported or _share(due)
        if due or is_shared:
            pending.flush()
        if pending.refused is not None and (is_shared or due and self._asks_alone):
            self.status = "diverged"
            self.refused = pending.refused
            return None
        with self._stopwatch.on(HOOKS):
            if is_over or reason or _share(due):
                self.state = self._publish(self.state)
            self.status = self._run_hooks(due)
        if self.status is not None:
            return None
        if due:
            pending.since = time.perf_counter()
        self.status = "done" if self.step == self._last_step else reason
        return metrics

    def leave(self) -> None:
        """End the loop after the step just taken, as its caller wants no more."""
        if self.status is None or self.status == "resized":
            self._pending.finish()
            self.status = "interrupted"

    def close(self) -> None:
        """Stop reading batches ahead; the state stays."""
        self._batches.close()

    def _take_step(self, batch: Batch) -> StepMetrics | None:
        """Take a step; None when it ends the loop, with its number not counted."""
        step = self.step + 1
        self._beat("step", step)
        try:
            with self._stopwatch.on(DISPATCH):
                self.state, metrics = self._step_function(self.state, batch)
        except EndRunError as error:
            logger.error("step %d: %s", step, error)
            self.status = cast(Status, error.status)
            return None
        self.step = step
        return metrics

    def _run_hooks(self, hooks: Sequence[Hook]) -> Status | None:
        """Run the hooks of a step; return the status when one of them ends the loop."""
        try:
            for hook in hooks:
                self._beat(getattr(hook, "name", type(hook).__name__), self.step)
                hook.run(self.step, self.state)
        except EndRunError as error:
            logger.error("step %d: %s", self.step, error)
            return cast(Status, error.status)
        return None


class _PendingMetrics:
    """Metrics of steps that have not been fetched yet."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        report: Callable[[Report], None],
        beat: Callable[[str, int], None],
        max_skipped: int,
    ):
        self._stopwatch = stopwatch
        self._report = report
        self._beat = beat
        self._max_skipped = max_skipped
        self._steps: list[tuple[int, StepMetrics]] = []
        self._positions: list[int | None] = []
        self._latest: deque[StepMetrics] = deque(maxlen=_LAG + 1)
        self.since = time.perf_counter()
        """Time from which training time is counted."""
        self.refused: tuple[int, int] | None = None
        """First and last of the first `max_skipped` steps refused in a row."""

    def add(self, step: int, metrics: StepMetrics, positions: int | None) -> bool:
        """Add a step; return whether too many were refused in a row, `_LAG` steps ago.

        The answer is the same on all processes.
        """
        self._steps.append((step, metrics))
        self._positions.append(positions)
        self._latest.append(metrics)
        if len(self._latest) <= _LAG:
            return False
        with self._stopwatch.on(WAIT):
            return int(self._latest[0].skipped_in_a_row) >= self._max_skipped

    def flush(self) -> None:
        """Report the pending metrics, and check whether too many steps were refused."""
        steps = tuple(number for number, _ in self._steps)
        with self._stopwatch.on(WAIT):
            for number, metric in self._steps:
                self._beat("step", number)
                jax.block_until_ready(metric.loss)
            metrics = fetch_metrics([metric for _, metric in self._steps])
        seconds = time.perf_counter() - self.since
        counts = [count for count in self._positions if count is not None]
        positions = float(sum(counts)) if len(counts) == len(steps) else None
        report = Report(steps=steps, metrics=metrics, seconds=seconds, positions=positions)
        with self._stopwatch.on(REPORT):
            self._report(report)
        self._steps.clear()
        self._positions.clear()
        self.since = time.perf_counter()
        self.refused = self.refused or _refuse(steps, metrics, self._max_skipped)

    def finish(self) -> None:
        """Report what is still pending, if anything."""
        if self._steps:
            self.flush()


def _share(hooks: Sequence[Hook]) -> bool:
    """Return whether a hook is due on all processes, which then report and end together."""
    return any(not getattr(hook, "is_local", False) for hook in hooks)


def _refuse(
    steps: Sequence[int], metrics: Sequence[StepMetrics], max_skipped: int
) -> tuple[int, int] | None:
    """Return the first and last of the first `max_skipped` steps refused in a row."""
    for number, metric in zip(steps, metrics, strict=True):
        if (in_a_row := int(metric.skipped_in_a_row)) >= max_skipped:
            return number - in_a_row + 1, number
    return None
