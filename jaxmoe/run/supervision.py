# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What surrounds a training run in its process: watchdog, signals, clock; comparisons, goodput.

`Watches` compares processes and workers during a run. The rules are in
`jaxmoe.resilience.stragglers`, `jaxmoe.resilience.outliers` and `jaxmoe.resilience.goodput`.

To add a comparison: its rule beside `jaxmoe/resilience/stragglers.py`, and its hook in
`Watches.hooks`, with warnings through `Watches.warn`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from jaxmoe.resilience.goodput import Ledger, account, read_ledger
from jaxmoe.resilience.outliers import OutlierWatch, worker_devices
from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.resilience.stragglers import StragglerHook
from jaxmoe.resilience.watchdog import Watchdog
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.training.hooks import Hook
from jaxmoe.training.loop import Report
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import CHECKPOINT, START, Stopwatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supervision:
    """Objects of one start of a run that belong to its process.

    A command builds its own, with a watchdog that ends the process and signals that end it before
    the first step. `library_supervision` is for all other programs.
    """

    watchdog: Watchdog
    """Receives a beat before each activity; ends the process only inside of its context."""
    stop: StopRequest
    """Request to save and stop, read after every step."""
    stopwatch: Stopwatch
    """Seconds of this start by kind."""
    resources: contextlib.ExitStack
    """Receives what must be closed at the end: lease, checkpoint manager, snapshots."""


@contextlib.contextmanager
def library_supervision(config: ProcessesConfig) -> Iterator[Supervision]:
    """Supervise a run in a notebook or a script, which keep their process whatever happens.

    The first Ctrl-C, SIGTERM or SIGHUP saves and stops the run, the second raises
    KeyboardInterrupt. Outside of the main thread, where Python allows no signal handlers, signals
    are left alone. No watchdog runs.

    Args:
        config: Timeouts of processes.
    """
    stop = StopRequest()
    is_main = threading.current_thread() is threading.main_thread()
    with contextlib.ExitStack() as resources:
        if is_main:
            resources.enter_context(stop)
        yield Supervision(
            watchdog=Watchdog(config),
            stop=stop,
            stopwatch=Stopwatch(START),
            resources=resources,
        )


_UNFINISHED: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()


def close_at_exit(steps: Generator[Any, None, None]) -> None:
    """Close a generator of steps when the program ends, if nothing has closed it by then.

    Python finalises a generator that a module still holds after its threads, without which nothing
    can be saved. One that is made outside of the main thread, whose end is not that of its loop, is
    left alone.

    Args:
        steps: Generator, of which only a weak reference is kept.
    """
    if threading.current_thread() is threading.main_thread():
        _UNFINISHED.add(steps)
        _before_threads_end()


@functools.cache
def _before_threads_end() -> None:
    # `atexit` is later than the end of all executors, which write checkpoints; they themselves end
    # by this hook, the last registered first. It is private: without it steps lose their last save.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(_close_unfinished)


def _close_unfinished() -> None:
    for steps in tuple(_UNFINISHED):
        if inspect.getgeneratorstate(steps) != inspect.GEN_RUNNING:
            steps.close()


_LOSSES = 16
"""Number of steps over which a worker must differ."""


class Watches:
    """Comparisons and records of one start of a run.

    Args:
        directory: Run directory.
        assembly: Plan, devices and data of the run.
        reporter: Receiver of warnings and numbers.
        spent: Stopwatch of this process.
        first_step: Number of steps already done.
        watchdog: Watchdog of this process, which receives a beat before each activity.
    """

    def __init__(
        self,
        directory: RunDirectory,
        assembly: Assembly,
        reporter: Reporter,
        spent: Stopwatch,
        first_step: int,
        watchdog: Watchdog,
    ):
        self._directory = directory
        self._assembly = assembly
        self.reporter = reporter
        self.spent = spent
        self.watchdog = watchdog
        self.warnings: list[str] = []
        """Warnings of this start."""
        self._outliers: dict[str, OutlierWatch] = {}
        """Comparisons of the workers of this mesh, by what is compared."""
        self._ledger = None
        if jax.process_index() == 0:
            self._ledger = Ledger(directory.goodput_file, spent, first_step=first_step)

    def hooks(self) -> list[Hook]:
        """Return the hooks of the comparisons; the same on every process."""
        config = self._assembly.plan.config
        hooks = list[Hook]()
        if jax.process_count() > 1:
            every = config.tracking.print_every
            hooks.append(StragglerHook(self.spent, every=every, report=self.warn))
        return hooks

    def on_mesh(self, assembly: Assembly) -> None:
        """Go on with the workers of another mesh.

        Args:
            assembly: Plan, devices and data of the steps that follow.
        """
        self._assembly = assembly
        self._outliers = {}
        self.reporter.on_mesh(assembly)

    def time_hook(self, hook: Hook, kind: str) -> Hook:
        """Return a hook whose time counts as `kind`.

        Args:
            hook: Hook of the loop.
            kind: Kind of time, of `jaxmoe.training.stopwatch`.
        """
        return _Timed(hook, self.spent, kind, self._note if kind == CHECKPOINT else None)

    def report_steps(self, report: Report) -> None:
        """Pass a report on, compare the losses of workers, and record the goodput."""
        self.reporter.log_steps(report)
        for step, metrics in zip(report.steps, report.metrics, strict=True):
            if metrics.worker_loss is not None:
                self.compare(step, "loss", metrics.worker_loss, _LOSSES, "steps")
        self._note(report.steps[-1])

    def warn(self, step: int, what: object) -> None:
        """Log a warning and keep it for the summary."""
        self.warnings.append(f"step {step}: {what}")
        self.reporter.warn(step, str(what))

    def goodput(self) -> dict[str, Any] | None:
        """Return the goodput of all starts up to now; None on all processes but the first."""
        if self._ledger is None:
            return None
        return account(read_ledger(self._directory.goodput_file)).to_json()

    def note(self, step: int, status: str) -> None:
        """Record how the start ended.

        Args:
            step: Number of steps done.
            status: Status of the loop.
        """
        if self._ledger is not None:
            self._ledger.record(step, status=status)

    def _note(self, step: int, *, is_kept: bool = False) -> None:
        if self._ledger is not None and not self._directory.is_lost:
            self._ledger.record(step, is_kept=is_kept)

    def compare(self, step: int, what: str, values: Any, window: int, unit: str) -> None:
        """Warn of workers that differ from the others over the last values of all.

        Args:
            step: Number of steps done.
            what: What is compared.
            values: One value for each worker, [W].
            window: Number of values over which a worker must differ.
            unit: What the window counts.
        """
        values = np.asarray(values)
        if what not in self._outliers:
            self._outliers[what] = OutlierWatch(window)
        for outlier in self._outliers[what].add(values):
            devices = worker_devices(self._assembly.mesh, len(values))[outlier.worker]
            ids = ", ".join(str(device.id) for device in devices)
            indices = sorted({device.process_index for device in devices})
            processes = ", ".join(str(index) for index in indices)
            self.warn(
                step,
                f"worker {outlier.worker} of {len(values)} (devices {ids}; process {processes})"
                f" differs from the others: its {what} by {outlier.excess:+.3g},"
                f" {outlier.spreads:.1f} spreads, over {window} {unit}",
            )


class _Timed:
    """A hook whose time is recorded."""

    def __init__(self, hook: Hook, spent: Stopwatch, kind: str, after: Callable[..., None] | None):
        self._hook = hook
        self._spent = spent
        self._kind = kind
        self._after = after
        self.name = type(hook).__name__

    def is_due(self, step: int) -> bool:
        """Return whether the hook is due."""
        return self._hook.is_due(step)

    def run(self, step: int, state: TrainState) -> None:
        """Run the hook."""
        with self._spent.on(self._kind):
            self._hook.run(step, state)
        if self._after is not None:
            self._after(step, is_kept=True)
