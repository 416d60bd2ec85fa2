# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds the time that a process takes to exit after its command has ended.

Python joins all threads before it exits: those of saves, of Orbax, TensorStore, grain and trackers.
Any of them may wait for something that never ends, such as a write to a disk that is gone. Every
command therefore ends through `run_command`:

    threads, exit handlers    a minute; then the process ends with the code of the command, and
                              names the threads
    teardown                  four minutes more for Python's last garbage collection, which takes
                              seconds on a busy machine, and for native libraries; no thread of
                              Python runs by then, and SIGALRM ends the process
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import jax

from experiments.cli.exit_codes import ExitCode
from jaxmoe.resilience.watchdog import leave_at_once

EXIT_SECONDS = 60.0
"""Timeout of an exit with one process."""

_PEERS = 900.0
"""Timeout of an exit with several processes, which wait for each other, and for the report."""

_TEARDOWN = 240.0
"""Seconds after that for Python to end; 30 were seen on a machine with 14 processes on 2 cores."""


def run_command(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command on the arguments of this process; exit with its code, whatever hangs.

    Args:
        main: Function of the command; returns its exit code.
    """
    try:
        with bounded_exit():
            sys.exit(main(sys.argv[1:]))
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _timeout(EXIT_SECONDS) + _TEARDOWN)


@contextlib.contextmanager
def bounded_exit(seconds: float | None = None) -> Iterator[None]:
    """Run a command within; afterwards, end the process if it does not exit by itself.

    The exit code is that of the command. A process that is ended names the threads it waited for.

    Args:
        seconds: Timeout of the exit; longer with several processes. `EXIT_SECONDS` when None.
    """
    code = 1
    try:
        yield
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        guard = threading.Thread(
            target=_end_after,
            args=(EXIT_SECONDS if seconds is None else seconds, code),
            name="bounded exit",
            daemon=True,
        )
        guard.start()


def exit_code(status: str) -> int:
    """Return the exit code of a run's status, or of an `Ending` of one of its processes.

    Args:
        status: Status of `TrainResult`, or an `Ending`. "failed" gives 1, as a traceback does.
    """
    return 1 if status == "failed" else int(ExitCode[status.upper()])


def _end_after(seconds: float, code: int) -> None:
    seconds = _timeout(seconds)
    time.sleep(seconds)
    main = threading.main_thread()
    thread_names = dict.fromkeys(
        thread.name for thread in threading.enumerate() if not thread.daemon
    )
    shown = [name for name in thread_names if name != main.name]
    names = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "") or "the exit handlers"
    with contextlib.suppress(OSError):
        print(
            f"error: the process did not exit within {seconds:g} s of its last step, because of"
            f" {names}: it ends now, with exit code {code}",
            file=sys.__stderr__,
            flush=True,
        )
    leave_at_once(code)


def _timeout(seconds: float) -> float:
    return max(seconds, _PEERS) if jax.distributed.is_initialized() else seconds
