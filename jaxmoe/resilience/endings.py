# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Ending`: why the library ended a process itself, without returning to the caller.

A command turns an ending into an exit code (`experiments/cli/exit_codes.py`).
"""

from __future__ import annotations

import enum


class Ending(enum.StrEnum):
    """Reasons for which `Watchdog` ends a process."""

    HUNG = "hung"
    """Nothing moved within the timeout; the stacks of all threads were written."""
    LOST = "lost"
    """Another process of the run ended or fell silent; its number was printed."""
    FAILED = "failed"
    """An exception left the run; its traceback was printed."""
    PREEMPTED = "preempted"
    """SIGTERM before the first step, when there is nothing to save."""
    INTERRUPTED = "interrupted"
    """Ctrl-C before the first step, when there is nothing to save."""
