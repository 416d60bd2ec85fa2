# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: the first asks the loop to save and stop, the second ends the process.

Before the first step there is nothing to save, and a compilation may take longer than a scheduler
waits: there the first signal can end the process. Python's own handlers would not run until the
compiler returns, so that a thread listens.

A run that another process has taken over stops as well, without saving.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal

from sharding.distributed import agree

Reason = Literal["preempted", "interrupted", "taken_over"]

_REASONS: dict[int, Reason] = {signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}


class StopRequest:
    """A context in which the two signals are noted instead of obeyed.

    The handler only sets a field, so that a step or a save is never torn apart.

    Args:
        before_steps: ends the process, for the reason given; called in a thread of its own, and
            never once `steps_begin` was. None: a signal waits for the first step.
        on_second: Called with the number of every signal after the first; None ends the process.
    """

    def __init__(
        self,
        before_steps: Callable[[Reason], None] | None = None,
        on_second: Callable[[int], None] | None = None,
    ) -> None:
        self.reason: Reason | None = None
        self._previous: dict[int, signal._HANDLER] = {}
        self._before_steps = before_steps
        self._on_second = on_second
        self._obeying = threading.Lock()
        self._mouth: socket.socket | None = None

    def __enter__(self) -> StopRequest:
        for number in _REASONS:
            self._previous[number] = signal.signal(number, self._note)
        if self._before_steps is not None:
            ears, self._mouth = socket.socketpair()
            self._mouth.setblocking(False)
            signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(ears,), name="signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.steps_begin()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._mouth is not None:
            signal.set_wakeup_fd(-1)
            self._mouth.close()  # the thread hears the end, and ends

    def steps_begin(self) -> None:
        """From here on a signal is obeyed after a step, and what was computed is saved."""
        with self._obeying:
            self._before_steps = None

    def agreed(self) -> Reason | None:
        """The reason that any process was given; every process must ask at the same step."""
        codes: tuple[Reason | None, ...] = (None, "preempted", "interrupted", "taken_over")
        return codes[agree(codes.index(self.reason))]

    def taken_over(self) -> None:
        """Another process writes to the run's directory; may be called in any thread."""
        self.reason = "taken_over"

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.reason is not None:
            if self._on_second is None:
                os._exit(128 + number)
            self._on_second(number)
            return
        self.reason = _REASONS[number]

    def _listen(self, ears: socket.socket) -> None:
        """Python writes the number of each signal here at once, whatever its main thread does."""
        with ears:
            while heard := ears.recv(1):
                reason = _REASONS.get(heard[0])
                with self._obeying:
                    if reason is not None and self._before_steps is not None:
                        self._before_steps(reason)
