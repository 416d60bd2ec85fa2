# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ends a run in order after a time, before a scheduler would."""

from __future__ import annotations

import dataclasses
import time
from typing import ClassVar, Literal

from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.config import RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.restore import Begun
from jaxmoe.run.supervision import Supervision


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimitConfig(RunPartConfig):
    """Ends the run in order after a time, as SIGTERM does: the state is saved."""

    name: ClassVar[str] = "time_limit"

    minutes: float = 60.0
    """Minutes from the restored state to the last step; saving and the report come on top."""

    def __post_init__(self):
        if not self.minutes > 0:
            raise ValueError(f"minutes={self.minutes} must be above 0")

    def build(self, directory: RunDirectory, supervision: Supervision) -> TimeLimit:
        """Return the part, whose time begins with the restored state."""
        del directory
        return TimeLimit(60.0 * self.minutes, supervision.stop)


class TimeLimit(RunPart):
    """Asks a run to stop once a time has passed.

    Args:
        seconds: Seconds from the restored state on.
        stop: Request of this process to stop, on which all processes agree.
    """

    def __init__(self, seconds: float, stop: StopRequest):
        self._seconds, self._stop = seconds, stop
        self._end: float | None = None

    def restored(self, begun: Begun) -> None:
        """Begin the time, unless this was a rollback."""
        del begun
        if self._end is None:
            self._end = time.monotonic() + self._seconds

    def event(self) -> Literal["resized"] | None:
        """Ask to stop when the time is over; the run ends after the next step."""
        if self._end is not None and time.monotonic() > self._end:
            self._stop.time_is_over()
        return None
