# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs training steps: batches, the step function, hooks and reports.

Metrics stay on the device and are fetched every `report_every` steps, before a hook runs, and at
the end, so that the host runs ahead of the device. The time of hooks is not training time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import jax

from jaxmoe.data.batch import Batch
from jaxmoe.errors import EndRunError
from jaxmoe.training.hooks import Hook
from jaxmoe.training.metrics import fetch_metrics
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import StepMetrics
from jaxmoe.training.stopwatch import DATA, DISPATCH, HOOKS, REPORT, WAIT, Stopwatch

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

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

    def agreed(self) -> StopReason | None:
        """Return the reason to stop, the same on all processes; each asks at the same step."""
        ...


class NeverStop:
    """A `Stop` that never ends the loop."""

    def steps_begin(self) -> None:
        """Do nothing."""

    def agreed(self) -> StopReason | None:
        """Return None."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Metrics of consecutive steps, on the host."""

    steps: tuple[int, ...]
    metrics: tuple[StepMetrics, ...]
    seconds: float
    """Training time of these steps."""

    @property
    def tokens_per_second(self) -> float:
        """Training throughput of these steps."""
        tokens = sum(float(metrics.num_tokens) for metrics in self.metrics)
        return tokens / max(self.seconds, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopResult:
    """How the loop ended."""

    state: TrainState
    step: int
    status: Status
    refused: tuple[int, int] | None = None
    """First and last of the steps refused in a row that ended a diverged run. Later steps, which
    the loop may have done before it fetched the metrics, are not counted."""


_LAG = 2
"""Steps after which the loop reads whether a step was refused; the device stays busy meanwhile."""


class _Waiting:
    """Steps whose metrics have not been fetched yet."""

    def __init__(
        self,
        stopwatch: Stopwatch,
        report: Callable[[Report], None],
        beat: Callable[[str, int], None],
        max_skipped: int,
    ):
        self._stopwatch, self._report, self._beat = stopwatch, report, beat
        self._max_skipped = max_skipped
        self.steps: list[tuple[int, StepMetrics]] = []
        self.since = time.perf_counter()
        self.refused: tuple[int, int] | None = None
        self._latest: deque[StepMetrics] = deque(maxlen=_LAG + 1)

    def add(self, step: int, metrics: StepMetrics) -> bool:
        """Add a step; return whether too many were refused in a row, `_LAG` steps ago.

        The answer is the same on all processes.
        """
        self.steps.append((step, metrics))
        self._latest.append(metrics)
        if len(self._latest) <= _LAG:
            return False
        with self._stopwatch.on(WAIT):
            return int(self._latest[0].skipped_in_a_row) >= self._max_skipped

    def flush(self) -> None:
        """Report the waiting metrics, and check whether too many steps were refused."""
        steps = tuple(number for number, _ in self.steps)
        with self._stopwatch.on(WAIT):
            for number, metric in self.steps:
                self._beat("step", number)
                jax.block_until_ready(metric.loss)
            metrics = fetch_metrics([metric for _, metric in self.steps])
        seconds = time.perf_counter() - self.since
        with self._stopwatch.on(REPORT):
            self._report(Report(steps=steps, metrics=metrics, seconds=seconds))
        self.steps.clear()
        self.since = time.perf_counter()
        self.refused = self.refused or _refused(steps, metrics, self._max_skipped)

    def finish(self) -> None:
        """Report what is still waiting, if anything."""
        if self.steps:
            self.flush()


def _take_step(
    step_function: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]],
    step: int,
    state: TrainState,
    batch: Batch,
) -> tuple[tuple[TrainState, StepMetrics] | None, Status]:
    """Return the next state and metrics, or None and the status when the step ends the run."""
    try:
        return step_function(state, batch), "done"
    except EndRunError as error:
        logger.error("step %d: %s", step, error)
        return None, cast(Status, error.status)


def _run_hooks(
    hooks: Sequence[Hook], step: int, state: TrainState, beat: Callable[[str, int], None]
) -> Status | None:
    """Run the hooks of a step; return the status when one of them ends the run."""
    try:
        for hook in hooks:
            beat(getattr(hook, "name", type(hook).__name__), step)
            hook.run(step, state)
    except EndRunError as error:
        logger.error("step %d: %s", step, error)
        return cast(Status, error.status)
    return None


def run_loop(
    state: TrainState,
    step_function: Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]],
    batches: Iterator[Batch],
    *,
    first_step: int,
    last_step: int,
    hooks: Sequence[Hook],
    report: Callable[[Report], None],
    report_every: int,
    max_skipped: int,
    publish: Callable[[TrainState], TrainState] = lambda state: state,
    stop: Stop | None = None,
    stopwatch: Stopwatch | None = None,
    beat: Callable[[str, int], None] = lambda what, step: None,
) -> Generator[tuple[int, StepMetrics], bool | None, LoopResult]:
    """Train until the last step, a signal, too many bad steps in a row, or devices that differ.

    A true value sent into the generator stops it after the step just yielded (see `drain`).

    Args:
        state: Initial state, donated.
        step_function: Step from `make_train_step`.
        batches: Batches on the devices, from `first_step` on.
        first_step: Steps already done.
        last_step: Total number of steps.
        hooks: Hooks in the order in which they run after a step.
        report: Called with the metrics.
        report_every: Steps between reports.
        max_skipped: Steps refused in a row that end the run.
        publish: Brings the parameters that the world sees up to date.
        stop: Request to stop, checked every step; with several processes every `report_every`.
        stopwatch: Receives the time of the loop by kind.
        beat: Called with an activity and its step when it begins.

    Yields:
        Number and metrics of each step, after its hooks; the generator returns how it ended.
    """
    stopwatch, stop = stopwatch or Stopwatch(), stop or NeverStop()
    stop.steps_begin()
    waiting, step, status = _Waiting(stopwatch, report, beat, max_skipped), first_step, "done"
    asks_alone = jax.process_count() == 1  # several must agree, which costs a collective
    while step < last_step and status == "done":
        beat("batch", step + 1)
        with stopwatch.on(DATA):
            batch = next(batches)
        step += 1
        beat("step", step)
        with stopwatch.on(DISPATCH):
            after, failure = _take_step(step_function, step, state, batch)
        if after is None:
            return LoopResult(state=state, step=step - 1, status=failure)
        state, metrics = after
        is_over = waiting.add(step, metrics) or step == last_step
        with stopwatch.on(WAIT):  # hooks and signals may need a collective
            due = [hook for hook in hooks if hook.is_due(step)]
            reason = stop.agreed() if asks_alone or step % report_every == 0 else None
        if reason == "taken_over":  # another process owns the files
            return LoopResult(state=state, step=step, status=reason)
        is_shared = is_over or bool(reason) or step % report_every == 0 or _shared(due)
        if due or is_shared:
            waiting.flush()
        if waiting.refused is not None and (is_shared or due and asks_alone):
            status = "diverged"
            break
        with stopwatch.on(HOOKS):
            state = publish(state) if is_over or reason or _shared(due) else state
            failure = _run_hooks(due, step, state, beat)
        if failure is not None:
            status = failure
            break
        waiting.since = time.perf_counter() if due else waiting.since
        status = reason if reason and step < last_step else status
        with stopwatch.on(HOOKS):
            is_left = yield step, metrics
        if is_left and status in ("done", "resized") and step < last_step:
            waiting.finish()
            status = "interrupted"
    refused = waiting.refused if status == "diverged" else None
    return LoopResult(state=state, step=step, status=status, refused=refused)


def drain(steps: Generator[Any, Any, Result]) -> Result:
    """Run a generator to its end and return its value.

    Args:
        steps: Such as `run_loop`.
    """
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def _shared(hooks: Sequence[Hook]) -> bool:
    """Return whether a hook is due on all processes, which then report and end together."""
    return any(not getattr(hook, "is_local", False) for hook in hooks)


def _refused(
    steps: Sequence[int], metrics: Sequence[StepMetrics], max_skipped: int
) -> tuple[int, int] | None:
    """Return the first and last of the first `max_skipped` steps refused in a row."""
    for number, metric in zip(steps, metrics, strict=True):
        if (in_a_row := int(metric.skipped_in_a_row)) >= max_skipped:
            return number - in_a_row + 1, number
    return None
