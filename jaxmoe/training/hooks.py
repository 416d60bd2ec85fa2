# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines hooks: work after certain steps, such as evaluation and traces.

`jaxmoe.training.loop.Loop` calls the hooks that are due. Checkpoints are saved by
`jaxmoe/checkpoint/hook.py`.

To add a hook: a class with `is_due` and `run`, and a line in `jaxmoe/run/hooks.py`.
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
    """Work after certain steps.

    All processes of a run must agree on when a hook is due. A hook that is due on some processes
    only has an attribute `is_local = True` and may not communicate.
    """

    def is_due(self, step: int) -> bool:
        """Return whether to run after this step."""
        ...

    def run(self, step: int, state: TrainState) -> None:
        """Run; the state must not be changed."""
        ...


def is_every(step: int, every: int, last_step: int) -> bool:
    """Return whether `step` is the last or a multiple of `every`; 0 means the last only."""
    return step == last_step or (every > 0 and step % every == 0)


class EvaluateHook:
    """Evaluates the held-out loss every few steps and at the end.

    Args:
        eval_step: Function from `make_eval_step`.
        batches: Returns the held-out batches, on the devices.
        every: Steps between evaluations.
        last_step: Last step of the run.
        report: Called with the step and the result.
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
        self._eval_step = eval_step
        self._batches = batches
        self._every = every
        self._last_step = last_step
        self._report = report

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due."""
        return is_every(step, self._every, self._last_step)

    def run(self, step: int, state: TrainState) -> None:
        """Evaluate and report."""
        result = evaluate(self._eval_step, state.params, state.router_state, self._batches())
        self._report(step, result)


class RefreshHook:
    """Makes the loop fetch metrics about once a second, for a live view.

    The loop reports before any hook that is due; this one does nothing else. The pace since the
    last call sets the number of steps until the next, so that the host still runs ahead of the
    device.

    Args:
        first_step: Restored step.
        clock: Monotonic clock, in seconds.
    """

    is_local = True

    def __init__(self, first_step: int, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._last = (first_step, clock())
        self._steps = 1

    def is_due(self, step: int) -> bool:
        """Return whether about a second has passed."""
        return step - self._last[0] >= self._steps

    def run(self, step: int, state: TrainState) -> None:
        """Measure the pace."""
        last_step, last_time = self._last
        now = self._clock()
        seconds = max(now - last_time, 1e-6) / (step - last_step)
        self._last, self._steps = (step, now), max(1, round(1.0 / seconds))


class Trace:
    """Profiles consecutive steps with `jax.profiler`, on one process.

    It has two hooks, so that evaluation or saving at its borders stay outside: put `start` after
    the other hooks and `stop` before them.

    Args:
        directory: Output directory.
        first: First traced step of the run, from 1.
        last: Last traced step of the run.
    """

    def __init__(self, directory: str | os.PathLike[str], first: int, last: int):
        self.directory = directory
        self.start = _TraceBorder(first - 1, self._start)
        self.stop = _TraceBorder(last, self._stop)
        self._is_running = False
        self.is_written = False
        """Whether a trace was written."""

    def close(self) -> None:
        """End the trace of a run that ended within it."""
        if self._is_running:
            jax.profiler.stop_trace()
            self._is_running = False
            self.is_written = True

    def _start(self, state: TrainState | None) -> None:
        jax.block_until_ready(state)
        jax.profiler.start_trace(os.fspath(self.directory))
        self._is_running = True

    def _stop(self, state: TrainState | None) -> None:
        jax.block_until_ready(state)
        self.close()


class _TraceBorder:
    """Hook that calls a function after one step."""

    is_local = True

    def __init__(self, step: int, function: Callable[[TrainState | None], None]):
        self._step = step
        self._function = function

    def is_due(self, step: int) -> bool:
        """Return whether this is the step."""
        return step == self._step

    def run(self, step: int, state: TrainState | None) -> None:
        """Start or end the trace."""
        self._function(state)
