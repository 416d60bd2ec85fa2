# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps: reporting, evaluating, saving, tracing. The loop calls, hooks
decide when.

To add one: a class with `is_due` and `run`, and a line where the hooks are put together
(`experiments/pretrain.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax

from jaxmoe.data.batch import Batch
from jaxmoe.training.evaluate import Evaluation, evaluate
from jaxmoe.training.state import TrainState


@runtime_checkable
class Hook(Protocol):
    """Something done after certain steps.

    All processes of a run must agree on them; a hook that is due on some processes only says so by
    an attribute `is_local = True`, and does nothing that concerns the others.
    """

    def is_due(self, step: int) -> bool:
        """Whether to run after this many steps."""
        ...

    def run(self, step: int, state: TrainState) -> None:
        """Runs; the state is only read."""
        ...


def is_every(step: int, every: int, last_step: int) -> bool:
    """Whether `step` is a multiple of `every`, or the last one; `every` 0: only the last."""
    return step == last_step or (every > 0 and step % every == 0)


class EvaluateHook:
    """Held-out loss, every so many steps and at the end.

    Args:
        eval_step: from `make_eval_step`.
        batches: makes the held-out batches anew, on the devices.
        every: steps.
        last_step: of the run.
        report: called with the step and the result.
    """

    def __init__(
        self,
        eval_step: Callable[..., Any],
        batches: Callable[[], Iterable[Batch]],
        *,
        every: int,
        last_step: int,
        report: Callable[[int, Evaluation], None],
    ):
        self._eval_step, self._batches = eval_step, batches
        self._every, self._last_step = every, last_step
        self._report = report

    def is_due(self, step: int) -> bool:
        """Every so many steps and at the end."""
        return is_every(step, self._every, self._last_step)

    def run(self, step: int, state: TrainState) -> None:
        """Evaluates and reports."""
        result = evaluate(self._eval_step, state.params, state.router_state, self._batches())
        self._report(step, result)


class RefreshHook:
    """Has the metrics fetched about once a second, for somebody who watches them.

    It does nothing itself: the loop reports before any hook that is due. The pace of the last
    stretch says how many steps a second has, so that the host still runs ahead of the device.

    Args:
        first_step: restored.
        clock: seconds, rising.
    """

    is_local = True

    def __init__(self, first_step: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last, self._steps = (first_step, clock()), 1

    def is_due(self, step: int) -> bool:
        """About once a second."""
        return step - self._last[0] >= self._steps

    def run(self, step: int, state: TrainState) -> None:
        """Notes the pace."""
        last_step, last_time = self._last
        now = self._clock()
        seconds = max(now - last_time, 1e-6) / (step - last_step)
        self._last, self._steps = (step, now), max(1, round(1.0 / seconds))


class Trace:
    """A profile of consecutive steps, by `jax.profiler`, on one process.

    Two hooks, because what else is due at its borders (evaluation, saving) is not to be in it:
    put `start` after them and `stop` before them.

    Args:
        directory: where to.
        first: step of the run, from 1; traced itself.
        last: step of the run; traced itself.
    """

    def __init__(self, directory: str | os.PathLike[str], first: int, last: int):
        self.directory = directory
        self.start = _TraceBorder(first - 1, self._start)
        self.stop = _TraceBorder(last, self._stop)
        self._is_running = False
        self.is_written = False
        """Whether there is a trace to look at."""

    def close(self) -> None:
        """Ends the trace of a run that ended within it."""
        if self._is_running:
            jax.profiler.stop_trace()
            self._is_running, self.is_written = False, True

    def _start(self, state: TrainState | None) -> None:
        jax.block_until_ready(state)
        jax.profiler.start_trace(os.fspath(self.directory))
        self._is_running = True

    def _stop(self, state: TrainState | None) -> None:
        jax.block_until_ready(state)
        self.close()


class _TraceBorder:
    """Runs a function after one step."""

    is_local = True

    def __init__(self, step: int, function: Callable[[TrainState | None], None]):
        self._step, self._function = step, function

    def is_due(self, step: int) -> bool:
        """After its step."""
        return step == self._step

    def run(self, step: int, state: TrainState | None) -> None:
        """Starts or ends the trace."""
        self._function(state)
