# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Guards the commit of a step: checks before it, syncs to disk, and counts failed saves.

    before a save      checks the lease and the free space, on all processes
    before the commit  lists and syncs every file of the step, and checks the lease again
    after the commit   syncs the files of the commit, the step and the directory of all steps

Orbax (0.12) commits by a rename. It calls `before_commit` in its own thread after the last write
and before the rename; an error there leaves the step uncommitted. TensorStore syncs only its
arrays, so the other files are synced here. After `CheckpointManager.finish` returned True, a step
survives a loss of power, as far as the disk keeps what it has synced. A step that was committed but
not finished may be lost, or be listed without the two files of its commit and then counts as
damaged; the files and arrays of a listed step are whole, or its checksums show the damage.

A fence checks whether another process has taken the directory over. Orbax writes two small files
between the last check and the rename: a process that is suspended there and loses its lease finds
its unfinished step deleted, because the next holder clears unfinished steps first.

To add a condition for saving: `jaxmoe/checkpoint/commit.py` (`may_save`, where an obstacle on one
process refuses the save on all).
"""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import checksums
from jaxmoe.errors import EndRunError
from sharding.distributed import agree, gather

logger = logging.getLogger(__name__)

_UNCOMMITTED = "*.orbax-checkpoint-tmp*"
TRASH = "trash"
"""Directory to which Orbax moves steps that are no longer kept; `empty_trash` deletes them."""

_LOST = "the first process has lost the run directory"

Fence = Callable[[], None]
"""Raises LeaseLostError if another process has taken the directory over."""


class LeaseLostError(EndRunError):
    """Another process has taken the directory over, and this one must not write to it."""

    status = "taken_over"


class SavesFailedError(EndRunError):
    """Too many saves in a row have failed."""

    status = "not_saved"


class Commits:
    """Checks, syncs and counts the saves of one manager.

    Args:
        directory: Directory of all steps.
        fence: Function called before a save and before its commit, on the process with the lease.
        is_writer: False for a manager that only reads.
    """

    def __init__(self, directory: Any, fence: Fence | None = None, *, is_writer: bool = True):
        self._directory = pathlib.Path(directory)
        self._fence = fence
        self._clears = is_writer and jax.process_index() == 0
        self.pending: int | None = None
        """Step whose save was started and not yet waited for."""
        self.failures = 0
        """Consecutive saves that failed."""
        self.lost: LeaseLostError | None = None
        """Error that forbids further writes."""

    def may_save(self, step: int, num_bytes: int) -> bool:
        """Return whether a save may begin: every process must call this; all get the same result.

        Args:
            step: Step to save.
            num_bytes: Size of its arrays; 1.2 times as much must be free.

        Raises:
            LeaseLostError: A process has lost the lease; raised on all processes.
        """
        obstacle = None
        try:
            self._ask_fence()
            free = shutil.disk_usage(self._directory).free
            if free < 1.2 * num_bytes:
                needed = f"{1.2 * num_bytes / 1e6:.1f} MB are needed"
                obstacle = OSError(f"{free / 1e6:.1f} MB are free, about {needed}")
        except (LeaseLostError, OSError) as error:  # a lost lease is raised on all below
            obstacle = error
        mine = [self.failures, self.lost is not None, obstacle is not None]
        failures, is_lost, is_refused = np.max(gather(np.asarray(mine, np.int32)), axis=0)
        self.failures = int(failures)
        if is_lost:
            raise self.lost or LeaseLostError(_LOST)
        if is_refused:
            self.note_failure(step, obstacle or OSError("another process cannot write it"))
        return not is_refused

    def check_held(self) -> None:
        """Raise unless this run still holds the directory; a barrier that every process must call.

        Raises:
            LeaseLostError: A process has lost the lease; raised on all processes.
        """
        with contextlib.suppress(LeaseLostError, OSError):  # `_ask_fence` keeps the first
            self._ask_fence()
        if agree(self.lost is not None):
            raise self.lost or LeaseLostError(_LOST)

    def before_commit(self) -> None:
        """List and sync the files to commit; Orbax calls this in its own thread."""
        if jax.process_index() != 0:
            return
        self._ask_fence()
        for path in self._directory.glob(_UNCOMMITTED):
            checksums.write_list(path)
            sync_tree(path)
        self._ask_fence()

    def done(self) -> None:
        """Sync the pending step, if any, after its commit.

        Raises:
            OSError: The step could not be synced.
        """
        step = self.pending
        self.pending = None
        if step is None:
            return
        if jax.process_index() == 0:
            path = self._directory / str(step)
            for mark in checksums.OF_THE_COMMIT:
                if (path / mark).exists():
                    _sync(path / mark)
            _sync(path)
            _sync(self._directory)
            # A late write of an earlier save that failed makes its directory anew.
            if any(self._directory.glob(_UNCOMMITTED)):
                self._remove_uncommitted()
        self.failures = 0

    def note_failure(self, step: int | None, error: BaseException) -> None:
        """Count and log a save that failed, and delete its files.

        Args:
            step: Step of the save; the pending one when None.
            error: Cause of the failure.
        """
        step = self.pending if step is None else step
        self.pending = None
        if isinstance(error, LeaseLostError):
            self.lost = error
            return
        self.failures += 1
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        logger.warning("%s was not saved, the run goes on: %s", which, reason)
        self._remove_uncommitted()

    def _remove_uncommitted(self) -> None:
        """Delete the files of saves that failed; no save may be in progress."""
        if not self._clears:
            return
        try:
            self._ask_fence()
        except (LeaseLostError, OSError):
            return  # the files may be those of another process
        for leftover in self._directory.glob(_UNCOMMITTED):
            shutil.rmtree(leftover, ignore_errors=True)

    def empty_trash(self) -> None:
        """Delete the steps that are no longer kept."""
        if self._clears:
            shutil.rmtree(self._directory / TRASH, ignore_errors=True)

    def _ask_fence(self) -> None:
        if self._fence is None:
            return
        try:
            self._fence()
        except LeaseLostError as error:
            self.lost = error
            raise


def sync_tree(path: pathlib.Path) -> None:
    """Sync a directory and all its files to disk, innermost first.

    Args:
        path: Directory to sync.
    """
    for root, _, files in os.walk(path, topdown=False):
        for name in files:
            _sync(pathlib.Path(root, name))
        _sync(pathlib.Path(root))


def _sync(path: pathlib.Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
