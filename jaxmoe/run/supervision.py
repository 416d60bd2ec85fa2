# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What surrounds a training run in its process: watchdog, signals, clock, resources."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from jaxmoe.resilience.processes_config import ProcessesConfig
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.resilience.watchdog import Watchdog
from jaxmoe.training.stopwatch import START, Stopwatch


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
