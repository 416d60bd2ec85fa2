# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exit codes of all commands."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """How a command ended; 1 is any exception that is not listed here."""

    DONE = 0
    BAD_CONFIGURATION = 2
    DIVERGED = 3
    DAMAGED = 65
    """A checkpoint differs from what was written (EX_DATAERR)."""
    LOST = 69
    """Another process of the run was lost, whose number was printed; or a server answered nothing
    (EX_UNAVAILABLE)."""
    NOT_SAVED = 74
    """The last state could not be written, or a second signal did not wait for that (EX_IOERR)."""
    PREEMPTED = 75
    """Saved after SIGTERM or SIGHUP; a scheduler should start the same command again
    (EX_TEMPFAIL)."""
    CORRUPTED = 76
    """A device holds other bits than its replicas: start again without it."""
    TAKEN_OVER = 77
    """Another process took the run directory over; this one wrote nothing more (EX_NOPERM)."""
    HUNG = 124
    """Nothing moved within the timeout; the stacks were written."""
    INTERRUPTED = 130
    """Saved after Ctrl-C (128 + SIGINT)."""
