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

from jaxmoe.checkpoint import CheckpointManager, SavesFailedError
from jaxmoe.checkpoint.fingerprint import fingerprints
from jaxmoe.data.batch import Batch
from jaxmoe.training.evaluate import Evaluation, evaluate
from jaxmoe.training.state import TrainState
from sharding.distributed import agree


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


class CheckpointHook:
    """Saves every so many steps and at the end, and at the next step after a save that failed.

    A loop that was stopped leaves its last state to whoever runs it, who calls this once more.

    Args:
        manager: where to.
        config: the run's config as JSON.
        position: data position after so many steps.
        every: steps.
        last_step: of the run.
        before: called before each save (to flush what belongs to the steps saved).
        agree_every: steps after which several processes ask one another whether a save failed.
        max_failed: saves in a row that fail before the run ends.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        last_step: int,
        before: Callable[[], None],
        agree_every: int = 1,
        max_failed: int = 5,
    ):
        self._manager, self._config, self._position = manager, config, position
        self._every, self._last_step, self._before = every, last_step, before
        self._agree_every, self._max_failed = agree_every, max_failed
        self.saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Every so many steps, at the end, and when the last save has failed.

        One process sees a failure at the next step; several ask one another every `agree_every`.
        """
        if is_every(step, self._every, self._last_step):
            return True
        if jax.process_count() > 1 and step % self._agree_every:
            return False
        return bool(agree(int(self._manager.is_owed())))

    def run(self, step: int, state: TrainState) -> None:
        """Starts a save; a failed one is reported by the manager and the run goes on.

        Raises:
            SavesFailedError: so many have failed in a row.
            LeaseLostError: another process writes to the directory by now.
        """
        if (failed := agree(self._manager.failures)) >= self._max_failed:
            raise SavesFailedError(
                f"{failed} saves in a row have failed (checkpoint.max_failed_saves="
                f"{self._max_failed}), the last reason is above: free space or mend the disk, then"
                " give the same command again"
            )
        self._before()
        position = self._position(step)
        if self._manager.save(step, state, config=self._config, data=position):
            self.saved_step = step


class ReplicaHook:
    """Compares what devices hold of the same arrays, every so many steps.

    Args:
        every: steps; 0: never.
    """

    def __init__(self, every: int):
        self._every = every

    def is_due(self, step: int) -> bool:
        """Every so many steps."""
        return self._every > 0 and step % self._every == 0

    def run(self, step: int, state: TrainState) -> None:
        """Raises ReplicasDifferError, naming devices and arrays, where they differ."""
        fingerprints(state)


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
