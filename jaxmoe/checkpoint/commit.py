# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What surrounds the commit of a step: may it be written, is it on the disk, how often did it fail.

    before a save      the lease is still ours and there is room: asked on all processes at once
    before the commit  every file of the step is listed and synced; the lease is asked once more
    after it           what the commit itself wrote, the step and the directory of all steps synced

Orbax (0.12) commits by a rename; it calls `before_commit` in its own thread after the last write
and before that rename, and an error there leaves the step uncommitted. TensorStore syncs its arrays
only, so the rest is synced here. Once `CheckpointManager.finish` has said that a step is saved, it
survives a loss of power, as far as the disk keeps what it has synced. A step that was committed and
not yet finished may be lost with the power, or be listed without the two marks of its commit, which
nothing reads; the files and arrays of a listed step are whole, or its checksums say so.

A fence asks whether somebody else writes to the directory by now. Between the last question and
the rename lie two small files of Orbax: a process that is stopped just there, loses its lease and
wakes again finds its unfinished step gone, because whoever takes over clears those first.

To add a condition of saving: in `may_save`, where a refusal on one process refuses on all.
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
"""Where Orbax renames steps that are no longer kept; it deletes none of them."""

_LOST = "the first process has lost the run directory"

Fence = Callable[[], None]
"""Raises LeaseLostError when another process writes to the directory by now."""


class LeaseLostError(EndRunError):
    """Another process has taken the directory over: this one must not write to it any more."""

    status = "taken_over"


class SavesFailedError(EndRunError):
    """Too many saves in a row have failed."""

    status = "not_saved"


class Commits:
    """The saves of one manager, from the question whether to the last sync.

    Args:
        directory: of all steps.
        fence: asked before a save and before its commit; on the process that holds the lease.
        is_writer: False for a manager that only reads.
    """

    def __init__(self, directory: Any, fence: Fence | None = None, *, is_writer: bool = True):
        self._directory, self._fence = pathlib.Path(directory), fence
        self._clears = is_writer and jax.process_index() == 0
        self.pending: int | None = None
        """The step whose save was started and not yet waited for."""
        self.failures = 0
        """Saves in a row that failed."""
        self.lost: LeaseLostError | None = None
        """Why nothing may be written any more."""

    def may_save(self, step: int, num_bytes: int) -> bool:
        """Whether a save may begin; every process must call this, and gets the same answer.

        Args:
            step: to save.
            num_bytes: of its arrays; a fifth more must be free.

        Raises:
            LeaseLostError: on all processes, if any has lost the lease.
        """
        obstacle = None
        try:
            self._ask_fence()
            free = shutil.disk_usage(self._directory).free
            if free < 1.2 * num_bytes:
                needed = f"{1.2 * num_bytes / 1e6:.1f} MB are needed"
                obstacle = OSError(f"{free / 1e6:.1f} MB are free, about {needed}")
        except (LeaseLostError, OSError) as error:  # a lost lease is noted, and raised on all below
            obstacle = error
        mine = [self.failures, self.lost is not None, obstacle is not None]
        failures, is_lost, is_refused = np.max(gather(np.asarray(mine, np.int32)), axis=0)
        self.failures = int(failures)
        if is_lost:
            raise self.lost or LeaseLostError(_LOST)
        if is_refused:
            self.failed(step, obstacle or OSError("another process cannot write it"))
        return not is_refused

    def check_held(self) -> None:
        """That the directory is still ours, before something in it moves; every process must call
        this, and none returns before all have come.

        Raises:
            LeaseLostError: on all processes, if any has lost the lease.
        """
        with contextlib.suppress(LeaseLostError, OSError):  # the first is noted
            self._ask_fence()
        if agree(self.lost is not None):
            raise self.lost or LeaseLostError(_LOST)

    def before_commit(self) -> None:
        """Lists and syncs the files about to be committed; Orbax calls it, in its own thread."""
        if jax.process_index() != 0:
            return
        self._ask_fence()
        for path in self._directory.glob(_UNCOMMITTED):
            checksums.write_list(path)
            sync_tree(path)
        self._ask_fence()

    def done(self) -> None:
        """The pending step, if any, is committed.

        Raises:
            OSError: it could not be synced.
        """
        step, self.pending = self.pending, None
        if step is None:
            return
        if jax.process_index() == 0:
            path = self._directory / str(step)
            for mark in checksums.OF_THE_COMMIT:
                if (path / mark).exists():
                    _sync(path / mark)
            _sync(path)
            _sync(self._directory)
        self.failures = 0

    def failed(self, step: int | None, error: BaseException) -> None:
        """Counts and reports a save that failed, and clears what it left.

        Args:
            step: of the save; None: the pending one.
            error: why.
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
        if not self._clears:
            return
        try:
            self._ask_fence()
        except (LeaseLostError, OSError):
            return  # what lies there may be another's
        for leftover in self._directory.glob(_UNCOMMITTED):
            shutil.rmtree(leftover, ignore_errors=True)

    def empty_trash(self) -> None:
        """Deletes the steps that were renamed away."""
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
    """Waits until a directory and all in it are on the disk, what is inside first.

    Args:
        path: of the directory.
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
