# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A process notices that its launcher has ended, however that was, and stops as at a signal.

The launcher keeps one end of a pipe open as long as it lives and writes nothing; the processes that
it starts inherit the other end. A launcher that is killed closes its end, at once and without a
timer, and one that is stopped for a while does not. What a process says after that is appended to
its log, which its launcher no longer writes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import sys
import threading

VARIABLE = "JAXMOE_LAUNCHER"
"""Environment variable with the end of the pipe, its inode and the log of the process."""


class LauncherLife:
    """Context of a launcher: processes that are started within notice when it ends."""

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None

    def __enter__(self) -> LauncherLife:
        self._ends = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._ends is not None
        for end in self._ends:
            os.close(end)
        self._ends = None

    @property
    def descriptor(self) -> int:
        """File descriptor that the processes inherit (`subprocess.Popen(pass_fds=...)`)."""
        assert self._ends is not None
        return self._ends[0]

    def environment(self, log: str | os.PathLike[str]) -> dict[str, str]:
        """Return the variables of a process.

        Args:
            log: File that gets what the process says after the launcher has ended.
        """
        inode = os.fstat(self.descriptor).st_ino
        return {VARIABLE: f"{self.descriptor} {inode} {os.path.abspath(log)}"}


def watch_launcher() -> threading.Thread | None:
    """Stop this process when its launcher has ended; return the thread that waits for it.

    The process receives SIGHUP, as when a terminal is closed, or SIGTERM if it ignores that. None
    without a launcher, or where the pipe did not come through, as over ssh.
    """
    number, _, identity = os.environ.pop(VARIABLE, "").partition(" ")
    inode, _, log = identity.partition(" ")
    try:
        status = os.fstat(int(number))
    except (ValueError, OSError):
        return None
    if not stat.S_ISFIFO(status.st_mode) or str(status.st_ino) != inode:
        return None  # a program between has closed the pipe, and opened another file
    os.set_inheritable(int(number), False)
    watch = threading.Thread(
        target=_wait, args=(int(number), log), name="life of the launcher", daemon=True
    )
    watch.start()
    return watch


def _wait(end: int, log: str) -> None:
    """Wait until the launcher has ended, and stop this process."""
    while os.read(end, 1):  # nothing is ever written
        continue
    os.close(end)
    _speak_into(log)
    with contextlib.suppress(OSError, ValueError):
        print("error: the launcher of this process has ended: stopping", file=sys.stderr)
        sys.stderr.flush()
    ignores = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    # Not a second signal for a process that its launcher has asked to stop before.
    os.kill(os.getpid(), signal.SIGTERM if ignores else signal.SIGHUP)


def _speak_into(log: str) -> None:
    """Append to the log what would go to pipes that have no reader any more."""
    with contextlib.suppress(OSError):
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for stream in (1, 2):
            if _is_unread(stream):
                os.dup2(file, stream)
        os.close(file)


def _is_unread(stream: int) -> bool:
    """Return whether a stream is a pipe without a reader."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return any(events & select.POLLERR for _, events in poll.poll(0))
