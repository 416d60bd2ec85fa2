# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Attributes the wall time of a process to kinds of work; every second belongs to exactly one.

    stopwatch = Stopwatch("start")
    with stopwatch.on("data"):
        batch = next(batches)

Contexts nest: the innermost kind counts, and time outside of any context belongs to the kind given
at construction. The seconds of all kinds therefore add up to the time since construction.

`jaxmoe.resilience.stragglers` compares processes by these times and `jaxmoe.resilience.goodput`
accounts for a run with them. The clock is the host's: asynchronous work on the devices appears as
"wait" when the host blocks on it.

To add a kind: a constant in `jaxmoe/training/stopwatch.py` and its row in
`jaxmoe/resilience/goodput.py`.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Final

START: Final = "start"  # imports, data, initial state, files of the run
RESTORE: Final = "restore"  # state of a checkpoint or snapshot
COMPILE: Final = "compile"
RESIZE: Final = "resize"  # moving the state to another mesh
DATA: Final = "data"  # waiting for the next batch and placing it on the devices
DISPATCH: Final = "dispatch"  # calling the compiled step; blocks when too many are in flight
WAIT: Final = "wait"  # blocking on results of the devices or on other processes
LOOP: Final = "loop"  # the loop's own work on the host
REPORT: Final = "report"  # trackers and console
EVALUATE: Final = "evaluate"
CHECKPOINT: Final = "checkpoint"  # the blocking part of saves, and the last save
HOOKS: Final = "hooks"  # any other work between steps
FINISH: Final = "finish"  # samples, plots and report after the last step


class Stopwatch:
    """Counts seconds by kind since its construction.

    Args:
        kind: Kind of the time outside of any `on` context.
        clock: Monotonic clock, in seconds.
        already: Seconds of `kind` before construction.
    """

    def __init__(
        self,
        kind: str = LOOP,
        *,
        clock: Callable[[], float] = time.perf_counter,
        already: float = 0.0,
    ):
        self._clock = clock
        self._kind = kind
        self._since = clock()
        self._seconds: dict[str, float] = {kind: already}

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Attribute the time within the context to `kind`, except in nested contexts."""
        before = self._switch(kind)
        try:
            yield
        finally:
            self._switch(before)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by kind, up to now."""
        self._switch(self._kind)
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Seconds of all kinds, up to now."""
        return sum(self.seconds.values())

    def _switch(self, kind: str) -> str:
        now = self._clock()
        before = self._kind
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._kind = kind
        self._since = now
        return before


def process_age() -> float:
    """Return the seconds since this process was started; 0 where the system has no such record."""
    try:
        # The command name, in brackets, may contain blanks; starttime is the 20th field after it.
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
