# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`TimeSpent`: on what a process spends its time; every second belongs to exactly one kind.

    spent = TimeSpent("start")
    with spent.on("data"):
        batch = next(batches)

Kinds are nested: the innermost one counts, and what nobody claims is of the kind around it. So the
seconds of all kinds are the time since it was made, by construction and not by adjustment.

Readers: `jaxmoe.resilience.stragglers` compares processes, `jaxmoe.resilience.goodput` accounts
for the time of a run. It measures the host: work that the devices do meanwhile shows as `wait`, once
somebody waits for it. To add a kind: a constant here, and its row in the books (`goodput.ROWS`).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Final

START: Final = "start"  # imports, initialisation, files of the run
RESTORE: Final = "restore"  # the initial state, and the checkpoint that takes its place
COMPILE: Final = "compile"
DATA: Final = "data"  # waiting for the next batch, and placing it on devices
DISPATCH: Final = "dispatch"  # handing a step to the devices; waits where too many are on their way
WAIT: Final = "wait"  # for results of the devices, or for other processes
LOOP: Final = "loop"  # what is left of the loop's own work on the host
REPORT: Final = "report"  # trackers and console
EVALUATE: Final = "evaluate"
CHECKPOINT: Final = "checkpoint"  # what a save keeps the loop from, and the last save
HOOKS: Final = "hooks"  # whatever else happens between steps
AFTERMATH: Final = "aftermath"  # samples, pictures, report


class TimeSpent:
    """Seconds by kind since it was made.

    Args:
        kind: what the time goes to until somebody says otherwise.
        clock: seconds, rising.
        already: seconds that had gone to `kind` before.
    """

    def __init__(
        self,
        kind: str = LOOP,
        *,
        clock: Callable[[], float] = time.perf_counter,
        already: float = 0.0,
    ):
        self._clock, self._kind = clock, kind
        self._since = clock()
        self._seconds: dict[str, float] = {kind: already}

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """What happens within goes to `kind`, except where it says otherwise itself."""
        before = self._switch(kind)
        try:
            yield
        finally:
            self._switch(before)

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, up to now."""
        self._switch(self._kind)
        return dict(self._seconds)

    @property
    def total(self) -> float:
        """Of all kinds, up to now."""
        return sum(self.seconds.values())

    def _switch(self, kind: str) -> str:
        now, before = self._clock(), self._kind
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since
        self._kind, self._since = kind, now
        return before


def process_age() -> float:
    """Seconds since this process was started, imports included; 0 where the system does not say."""
    try:
        # The command's name, in brackets, may hold blanks; starttime is the 20th field after it.
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
