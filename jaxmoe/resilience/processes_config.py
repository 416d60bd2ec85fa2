# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ProcessesConfig`: timeouts of a run with one or several processes, and their order."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessesConfig:
    """Order of the processes in the mesh, and timeouts after which a run ends with the cause."""

    order: tuple[int, ...] = ()
    """Processes in the order in which their devices fill the mesh, such as the order of a plan for
    hosts with unequal links; empty keeps the usual order."""
    start: int = 300
    """Timeout for all processes to connect, in seconds."""
    heartbeat: int = 30
    """Seconds of silence after which a process counts as lost and the others end."""
    barrier: int = 600
    """Timeout of a named barrier between processes, in seconds."""
    watchdog: int = 900
    """Timeout of a step, batch, save or evaluation, in seconds; then the process writes its stacks
    and exits with 124. 0 disables it."""
    first: int = 3600
    """Timeout of the first activity of each kind, which may compile, in seconds."""

    def __post_init__(self):
        if sorted(self.order) != list(range(len(self.order))):
            raise ValueError(
                f"processes.order={self.order} must name the processes 0 to {len(self.order) - 1}"
                " once each"
            )
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
