# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Signals`: notes the signals of a supervisor and forwards them to its processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Any


class Signals:
    """Notes SIGTERM, SIGHUP and Ctrl-C, and forwards them to the running processes."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._running: list[subprocess.Popen[str]] = []
        self._reached: list[subprocess.Popen[str]] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup
            self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def add(self, process: subprocess.Popen[str]) -> None:
        """Forward signals to a started process, including one that came before.

        Args:
            process: Started process.
        """
        self._running.append(process)
        if self.number is not None and process not in self._reached:
            process.send_signal(self.number)

    def forget(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        """Stop forwarding to processes of a start that has ended.

        Args:
            processes: Ended processes.
        """
        self._running = [process for process in self._running if process not in processes]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = number
        for process in self._running:
            self._reached.append(process)
            process.send_signal(number)
