# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ProcessesConfig`: how long the processes of a run wait for one another, and for themselves."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessesConfig:
    """How long anything may take before the run ends with the cause."""

    start: int = 300
    """Seconds within which all processes must have come."""
    heartbeat: int = 30
    """Seconds of silence after which a process counts as lost, and the others end."""
    barrier: int = 600
    """Seconds that processes wait for one another at a point with a name."""
    watchdog: int = 900
    """Seconds that a step, a batch, a save or an evaluation may take: a process that stands still
    for longer writes where, and ends with 124. 0: never."""
    first: int = 3600
    """The same of what is done for the first time, which may compile."""

    def __post_init__(self):
        for field in ("start", "heartbeat", "barrier", "first"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"processes.{field}={getattr(self, field)} must be at least 1 second"
                )
        if self.watchdog < 0:
            raise ValueError(f"processes.watchdog={self.watchdog} must be 0 (never) or more")
        if self.watchdog > self.first:
            raise ValueError(
                f"processes.watchdog={self.watchdog} must not exceed processes.first={self.first}:"
                " what is done for the first time takes longer"
            )
