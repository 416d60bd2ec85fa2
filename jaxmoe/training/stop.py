# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C: the first asks the loop to save and stop, the second ends the process.

A run that another process has taken over stops as well, without saving.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Literal

from sharding.distributed import agree

Reason = Literal["preempted", "interrupted", "taken_over"]

_REASONS: dict[int, Reason] = {signal.SIGTERM: "preempted", signal.SIGINT: "interrupted"}


class StopRequest:
    """A context in which the two signals are noted instead of obeyed.

    The handler only sets a field, so that a step, a save or a compilation is never torn apart.
    """

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        for number in _REASONS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

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
            os._exit(128 + number)
        self.reason = _REASONS[number]
