# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Bounds the time that a process takes to exit after its command has ended.

Python joins all threads before it exits. A thread of a save that failed may wait for a write that
never ends, such as one whose event loop was closed on an error of the disk.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

import jax

from jaxmoe.resilience.watchdog import leave_at_once

EXIT_SECONDS = 60.0
"""Timeout of an exit with one process."""

_PEERS = 900.0
"""Timeout of an exit with several processes, which wait for each other, and for the report."""


@contextlib.contextmanager
def bounded_exit(seconds: float = EXIT_SECONDS) -> Iterator[None]:
    """Run a command within; afterwards, end the process if it does not exit by itself.

    The exit code is that of the command. A process that is ended names the threads it waited for.

    Args:
        seconds: Timeout of the exit; longer with several processes.
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
            target=_end_after, args=(seconds, code), name="bounded exit", daemon=True
        )
        guard.start()


def _end_after(seconds: float, code: int) -> None:
    seconds = max(seconds, _PEERS) if jax.distributed.is_initialized() else seconds
    time.sleep(seconds)
    main = threading.main_thread()
    held = dict.fromkeys(thread.name for thread in threading.enumerate() if not thread.daemon)
    shown = [name for name in held if name != main.name]
    names = ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "") or "the exit handlers"
    with contextlib.suppress(OSError):
        print(
            f"error: the process did not exit within {seconds:g} s of its last step, because of"
            f" {names}: it ends now, with exit code {code}",
            file=sys.__stderr__,
            flush=True,
        )
    leave_at_once(code)
