# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What the exit status of every entry point means."""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """By how a command ended; what is not here ended with a traceback."""

    DONE = 0
    BAD_CONFIGURATION = 2
    DIVERGED = 3
    DAMAGED = 65
    """A checkpoint is not what was written (EX_DATAERR)."""
    LOST = 69
    """Another process of the run was lost; its number has been said (EX_UNAVAILABLE)."""
    NOT_SAVED = 74
    """Ended as it should, but its last state could not be written (EX_IOERR)."""
    PREEMPTED = 75
    """Saved after SIGTERM; a scheduler should start the same command again (EX_TEMPFAIL)."""
    CORRUPTED = 76
    """A device holds other bits than its replicas: start again without it."""
    TAKEN_OVER = 77
    """Another process has taken the run over; this one wrote nothing more (EX_NOPERM)."""
    HUNG = 124
    """Nothing moved for the time allowed; the stacks have been written."""
    INTERRUPTED = 130
    """Saved after Ctrl-C (128 + SIGINT)."""
