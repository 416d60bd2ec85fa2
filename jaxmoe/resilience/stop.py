# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns SIGTERM, SIGHUP and Ctrl-C into a request to stop; a second signal ends at once.

Before the first step there is nothing to save, and a compilation may take longer than a scheduler
waits, so the first signal can end the process there. Python signal handlers do not run until the
compiler returns; a thread listens instead, to a second signal as well.

SIGHUP comes when a terminal is closed, and often twice: it is like SIGTERM, and never counts as the
second signal. A process that was started to ignore it (nohup) still does.

A run that another process has taken over stops as well, without saving.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal

from sharding.distributed import agree

Reason = Literal["preempted", "interrupted", "taken_over"]

_REASONS: dict[int, Reason] = {
    signal.SIGTERM: "preempted",
    signal.SIGHUP: "preempted",
    signal.SIGINT: "interrupted",
}


class StopRequest:
    """Context in which the signals set `reason` instead of ending the process.

    The handler only sets a field, so that no step or save is interrupted.

    Args:
        before_steps: Ends the process for a reason; called in a thread of its own, and never after
            `steps_begin`. None: the signal takes effect after the first step.
        on_second: Called with the number of a second signal, in any thread; None raises
            KeyboardInterrupt.
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
        self._starting = threading.Lock()
        self._sender: socket.socket | None = None

    def __enter__(self) -> StopRequest:
        for number in _REASONS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._note)
        if self._before_steps is not None:
            receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            threading.Thread(
                target=self._listen, args=(receiver,), name="signals", daemon=True
            ).start()
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
        if self._sender is not None:
            signal.set_wakeup_fd(-1)
            self._sender.close()  # the thread ends

    def steps_begin(self) -> None:
        """From now on a signal takes effect after a step, whose state is saved."""
        with self._starting:
            self._before_steps = None

    def agree(self) -> Reason | None:
        """Return the reason that any process has; every process must call it at the same step."""
        codes: tuple[Reason | None, ...] = (None, "preempted", "interrupted", "taken_over")
        return codes[agree(codes.index(self.reason))]

    def taken_over(self) -> None:
        """Stop because another process writes to the run directory; callable in any thread."""
        self.reason = "taken_over"

    def time_is_over(self) -> None:
        """Stop as after SIGTERM, unless there is a reason already; callable in any thread."""
        if self.reason is None:
            self.reason = "preempted"

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.reason is not None:
            if number == signal.SIGHUP:
                return
            if self._on_second is None:
                raise KeyboardInterrupt(signal.Signals(number).name)
            self._on_second(number)
            return
        self.reason = _REASONS[number]

    def _listen(self, receiver: socket.socket) -> None:
        """Receive the number of each signal, which Python writes here at once."""
        is_second = False
        with receiver:
            while received := receiver.recv(1):
                number = received[0]
                if (reason := _REASONS.get(number)) is None:
                    continue
                with self._starting:
                    if self._before_steps is not None:
                        self._before_steps(reason)
                if is_second and number != signal.SIGHUP and self._on_second is not None:
                    self._on_second(number)
                is_second = True
