# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the supervisor does about a process that is lost again and again: `--elastic`.

To add a choice: a config here with `build`, and its place in `ElasticConfig`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import ClassVar

from experiments.cli.exit_codes import ExitCode
from jaxmoe.resilience.shared_memory import ELASTIC


class Places:
    """Places of processes on this host, all of which are always used.

    Args:
        number: Number of places.
    """

    environment: dict[str, str] = {}
    """Variables of the processes."""

    def __init__(self, number: int):
        self.used = list(range(number))
        """Places of the next start; process i of a start is at used[i]."""

    def note_refusal(self, code: int) -> bool:
        """Note that a start refused its configuration; return whether another one is of use."""
        del code
        return False

    def lost(self, process: int | None) -> str:
        """Note the process that a start has lost; return what changes, in words."""
        del process
        return ""

    @property
    def lasts(self) -> float:
        """Seconds after which a start is ended, so that the next one has more places."""
        return float("inf")


class ShrinkingPlaces(Places):
    """Places of which those that lose their process again and again are left out for a while.

    Args:
        number: Number of places.
        after: Losses of one place in a row after which it is left out.
        retry: Seconds after which places that were left out are tried again.
        clock: Monotonic clock, in seconds.
    """

    environment = {ELASTIC: "shrink"}

    def __init__(
        self, number: int, after: int, retry: float, clock: Callable[[], float] = time.monotonic
    ):
        super().__init__(number)
        self._all = list(self.used)
        self._after = after
        self._retry = retry
        self._clock = clock
        self._losses = 0
        self._latest: int | None = None
        self._since = 0.0

    def note_refusal(self, code: int) -> bool:
        """Leave one more place out, where so few processes cannot share the batch."""
        if code != ExitCode.BAD_CONFIGURATION or not 1 < len(self.used) < len(self._all):
            return False
        self.used.pop()
        return True

    def lost(self, process: int | None) -> str:
        """Leave the place of the process out if it was lost `after` times in a row."""
        if process is None:
            return self._grow()
        place = self.used[process]
        self._losses = self._losses + 1 if place == self._latest else 1
        self._latest = place
        if self._losses < self._after or len(self.used) == 1:
            return self._grow()
        self.used.remove(place)
        self._losses, self._since = 0, self._clock()
        return f"place {place} is left out: {len(self.used)} of {len(self._all)} processes go on"

    @property
    def lasts(self) -> float:
        """Seconds until the places that were left out are tried again."""
        if len(self.used) == len(self._all):
            return float("inf")
        return max(0.0, self._since + self._retry - self._clock())

    def _grow(self) -> str:
        if self.lasts > 0.0:
            return ""
        self.used = list(self._all)
        self._losses = 0
        self._latest = None
        return f"all {len(self._all)} processes are tried again"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FixedConfig:
    """Always start all processes."""

    name: ClassVar[str] = "fixed"

    def build(self, processes: int) -> Places:
        """Return the places of this many processes."""
        return Places(processes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShrinkConfig:
    """Go on with fewer processes, on a smaller mesh, when one is lost for good."""

    name: ClassVar[str] = "shrink"

    after: int = 2
    """Losses of the same process in a row after which it is left out."""
    retry: int = 600
    """Seconds after which the run is saved and all processes are tried again."""

    def __post_init__(self):
        for field in ("after", "retry"):
            if getattr(self, field) < 1:
                raise ValueError(f"elastic.{field}={getattr(self, field)} must be at least 1")

    def build(self, processes: int) -> Places:
        """Return the places of this many processes."""
        return ShrinkingPlaces(processes, self.after, self.retry)


ElasticConfig = FixedConfig | ShrinkConfig
