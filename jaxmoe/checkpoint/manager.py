# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saves and restores states through Orbax, asynchronously, with one commit per step.

    <directory>/<step>/state      arrays (parameters, optimiser, router state, randomness, counters)
    <directory>/<step>/manifest   names, shapes, dtypes and fingerprints of arrays, config, position
    <directory>/<step>/files.json size and checksum of each file
    <directory>/damaged/<step>    damaged or abandoned steps, set aside

A lazy save copies the state on its devices and returns; a thread transfers and fingerprints the
copy (`writing.py`). Orbax renames a step into place when all of it is written: a process killed at
any time leaves the previous step. A save that fails (a full disk) is logged and the run goes on;
`is_owed` is True until it is repeated (`commit.py` guards the commit). Old steps are renamed before
they are deleted, so that a listed step is always whole; they are deleted after the commit of a
newer step. Steps set aside do not count towards `keep`.

Restores are verified by default: files by their checksums before reading, arrays by their
fingerprints after reading. `restore_newest` sets a damaged step aside and uses the previous one.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint.base_model import BaseModel
from jaxmoe.checkpoint.capture import is_on_host, reason_against
from jaxmoe.checkpoint.commit import TRASH, Commits, Fence
from jaxmoe.checkpoint.damage import (
    Verify,
    check_directory,
    damage_of_step,
    make_directory,
    opening_errors,
)
from jaxmoe.checkpoint.manifest import (
    CheckpointAbandonedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    CheckpointsLostError,
    check_arrays,
    check_count,
    check_global,
    check_json,
    make_manifest,
    read_manifest,
)
from jaxmoe.checkpoint.reading import read_state, shared_manifest, shared_steps
from jaxmoe.checkpoint.writing import SAVE_ERRORS, StepWriter, literal_path, open_manager
from jaxmoe.fingerprints import ReplicasDifferError
from jaxmoe.messages import mute
from jaxmoe.state_tree import pack
from sharding.distributed import agree, gather

logger = logging.getLogger(__name__)

_DAMAGED = "damaged"
_THREADS = 16
"""More threads than a save has; each that failed raises its error once, at closing as well."""


class CheckpointManager:
    """Saves, lists and restores the checkpoints of one run.

    Args:
        directory: Directory with one directory per step; made if missing.
        keep: Number of newest steps to keep, at least 2 (the last may be damaged or unfinished).
        is_writer: False only reads, and creates no files.
        verify: Checks of a restore.
        pinned_steps: Further steps to keep, however old.
        fence: Function that raises LeaseLostError if another process has taken the directory
            over; called before each save and commit and before a step is set aside.
        base: Model whose parameters checkpoints leave out; None: they have all parameters.
    """

    def __init__(
        self,
        directory: Any,
        *,
        keep: int = 3,
        is_writer: bool = True,
        verify: Verify = "full",
        pinned_steps: Sequence[int] = (),
        fence: Fence | None = None,
        base: BaseModel | None = None,
    ):
        if keep < 2:
            raise ValueError(f"keep={keep} must be at least 2: the last may be unfinished")
        self.directory = literal_path(directory)
        with opening_errors(self.directory):
            check_directory(self.directory, (TRASH, _DAMAGED), is_writer=is_writer)
            if is_writer:
                make_directory(self.directory)
        self.damaged_directory = self.directory / _DAMAGED
        self._is_writer = is_writer
        self._base = base
        self._verify: Verify = verify
        self._commits = Commits(self.directory, fence, is_writer=is_writer)
        self._commits.empty_trash()
        self._corrupted: ReplicasDifferError | None = None
        self._has_warned = False
        with mute("absl", "directory is read only"), opening_errors(self.directory):
            before_commit = self._commits.before_commit if is_writer else None
            self._manager = open_manager(self.directory, keep, before_commit, pinned_steps)
        self._writer = StepWriter(self._manager)

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        self._manager.reload()
        return sorted(step for step in self._manager.all_steps() if self._has(step))

    def shared_steps(self) -> list[int]:
        """Return the steps that the first process lists; every process must call this."""
        return shared_steps(self.steps)

    def latest_step(self) -> int | None:
        """Return the newest committed step."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        config: dict[str, Any],
        data: dict[str, Any] | None = None,
        is_lazy: bool = False,
    ) -> bool:
        """Start saving a state; return when it has been copied and may be donated.

        Args:
            step: Number of the checkpoint.
            state: Tree of named arrays, all on one mesh.
            config: Config of the run as JSON.
            data: Data position.
            is_lazy: Copy the state on its devices, and return before the transfer to the host and
                the fingerprints. Where no second state fits, the save waits for them, with a
                warning; for a state of the host's own devices, whose memory the writer reads, it
                waits until all is written.

        Returns:
            False if this save, or the previous one that was still being written, failed; the
            reason is logged.

        Raises:
            LeaseLostError: Another process has taken the directory over; raised on all processes.
            ReplicasDifferError: Devices hold other bits than their replicas, in this state or in
                that of an earlier lazy save; raised on all processes.
        """
        state = state if self._base is None else self._base.without(state)
        check_arrays(state)
        check_json(config=config, data=data or {})
        packed = pack(state)
        is_written_in_place = is_on_host(packed)
        reason = reason_against(packed) if is_lazy or is_written_in_place else ""
        is_failed = not self.finish()
        is_there = jax.process_index() == 0 and self._has(step)
        # In one exchange, because each takes milliseconds.
        mine = np.asarray([is_failed, is_there, bool(reason)], np.int32)
        is_failed, is_there, is_short = np.max(gather(mine), axis=0).astype(bool)
        if self._corrupted is not None:
            raise self._corrupted
        if not is_there:
            check_global(state)
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed))
        if not self._commits.may_save(step, 0 if is_there else needed):
            return False
        if is_there:
            return not is_failed
        if is_short and not self._has_warned:
            shown = reason or "another process has no memory for a copy of the state"
            end = "written" if is_written_in_place else "on the host"
            logger.warning("saves wait until the state is %s: %s", end, shown)
            self._has_warned = True
        try:
            base = None if self._base is None else self._base.to_json()
            manifest = make_manifest(
                state, step=step, config=config, data=data or {}, prints={}, base=base
            )
            self._writer.write(
                manifest, jax.tree.map(_on_host_or_device, packed), is_lazy=is_lazy and not is_short
            )
            self._commits.pending = step
        except SAVE_ERRORS as error:
            self._commits.note_failure(step, error)
            return False
        if is_short and is_written_in_place:
            return self.finish() and not is_failed
        return not is_failed

    def _has(self, step: int) -> bool:
        """Return whether a step is there; without a list of all, which takes long."""
        return (self.directory / str(step) / "manifest").exists()

    def finish(self) -> bool:
        """Wait for the current save.

        Returns:
            True if it is on the disk, or there was none; False if it failed; the reason is logged.
        """
        try:
            self._writer.join()
            self._commits.done()
        except SAVE_ERRORS as error:
            self._commits.note_failure(None, error)
            return False
        except ReplicasDifferError as error:
            self._commits.note_failure(None, error)
            self._corrupted = error
            return False
        finally:
            self._commits.empty_trash()
        return True

    def is_saving(self) -> bool:
        """Return whether a save is being written."""
        return self._writer.is_writing()

    @property
    def failures(self) -> int:
        """Consecutive saves that failed, as far as is known without waiting."""
        if self._commits.pending is not None and not self.is_saving():
            self.finish()
        return self._commits.failures

    def is_owed(self) -> bool:
        """Return whether the last finished save failed; does not wait for the current one."""
        is_bad = self.failures > 0 or (self._commits.lost or self._corrupted) is not None
        return is_bad and self._commits.pending is None

    def manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest of a step.

        Raises:
            CheckpointError: There is no such step; the message lists the steps.
        """
        if not self._has(step):
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.directory} has no checkpoint of step {step} (has: {have})"
            )
        return read_manifest(pathlib.Path(self.directory) / str(step))

    def shared_manifest(self, step: int) -> CheckpointManifest:
        """Return the manifest that the first process reads; every process must call this."""
        return shared_manifest(lambda: self.manifest(step))

    def newest_readable_manifest(self) -> CheckpointManifest | None:
        """Return the manifest of the newest step that has one to read, if any.

        Its files are not checked. Every process must call this.
        """
        for step in reversed(self.shared_steps()):
            with contextlib.suppress(CheckpointDamagedError):
                return self.shared_manifest(step)
        return None

    def restore(self, step: int, target: Any) -> Any:
        """Return the state of a step, verified; every process must call this.

        Args:
            step: Committed step.
            target: Tree of arrays or `jax.ShapeDtypeStruct` with shardings. Each array is read
                directly to the target's sharding, whatever mesh it was saved on. None: nested
                dicts of arrays on the default device.

        Raises:
            CheckpointError: There is no such step, or its arrays differ from the target's; the
                message lists them.
            CheckpointDamagedError: Files or arrays have changed; the message lists them.
        """
        self.check_files(step)
        return self._read(step, self.shared_manifest(step), target)

    def _read(self, step: int, manifest: CheckpointManifest, target: Any) -> Any:
        """Return the state of a step whose files have been checked; checks its arrays."""
        where = f"{self.directory}/{step}"
        base = None if target is None else self._base
        if base is None:
            return read_state(self.directory / str(step), manifest, target, where, self._verify)
        base.check(manifest, where)
        own_target = base.without(target)
        state = read_state(self.directory / str(step), manifest, own_target, where, self._verify)
        return base.complete(state, target)

    def restore_newest(
        self,
        target: Any,
        *,
        check: Callable[[CheckpointManifest], None] | None = None,
        is_strict: bool = False,
        counts_steps: bool = False,
    ) -> tuple[int, Any] | None:
        """Return the newest undamaged step and its state; None if there are no steps.

        A damaged step is logged and set aside (a reader does not move it), and the previous step is
        tried. Every process must call this.

        Args:
            target: See `restore`.
            check: Function that raises a ValueError to refuse a manifest, or
                CheckpointAbandonedError to set the step aside.
            is_strict: Raise at the first damaged step.
            counts_steps: Whether states are of a run: one of another step than its directory counts
                as damaged.

        Raises:
            CheckpointsLostError: All steps are damaged.
            CheckpointError: The arrays differ from the target's.
            LeaseLostError: Another process has taken the directory over.
        """
        steps = self.shared_steps()
        abandoned = 0
        for step in reversed(steps):
            try:
                self.check_files(step)
                manifest = self.shared_manifest(step)
                if check is not None:
                    check(manifest)
                state = self._read(step, manifest, target)
                if counts_steps:
                    check_count(step, state, f"{self.directory}/{step}")
                return step, state
            except CheckpointAbandonedError as error:
                self._set_aside(step, error)
                abandoned += 1
            except CheckpointDamagedError as error:
                if is_strict:
                    raise
                self._set_aside(step, error)
        if len(steps) > abandoned:
            raise CheckpointsLostError(
                f"{self.directory}: all steps are damaged ({', '.join(map(str, steps))}): start in"
                " another directory, or restore a copy"
            )
        return None

    def newest_whole_step(self) -> int | None:
        """Return the newest step with undamaged files, if any; every process must call this."""
        for step in reversed(self.shared_steps()):
            try:
                self.check_files(step)
                return step
            except CheckpointDamagedError as error:
                self._set_aside(step, error)
        return None

    def check_files(self, step: int) -> None:
        """Check the files of a step; every process must call this.

        Raises:
            CheckpointDamagedError: A file has changed; raised on all processes.
        """
        lines: list[str] = []
        if jax.process_index() == 0 and self._has(step):
            lines = self.damage(step)
        if agree(len(lines)):
            shown = "; ".join(lines[:5]) or "as the first process found"
            raise CheckpointDamagedError(
                f"{self.directory}/{step} is damaged: {shown}"
                + (f"; and {len(lines) - 5} more files" if len(lines) > 5 else "")
            )

    def damage(self, step: int) -> list[str]:
        """Return one line for each damaged file of a step."""
        return damage_of_step(pathlib.Path(self.directory) / str(step), self._verify)

    def _set_aside(self, step: int, error: CheckpointError) -> None:
        logger.warning("%s; the step before it is used", error)
        if not self._is_writer:
            return
        self._commits.check_held()  # a barrier: all processes have stopped reading
        if jax.process_index() == 0:
            shelf = self.damaged_directory
            shelf.mkdir(exist_ok=True)
            names = [str(step), *(f"{step}-{number}" for number in range(2, 1000))]
            free = next(name for name in names if not (shelf / name).exists())
            (self.directory / str(step)).rename(shelf / free)
        agree(0)  # a barrier: no process lists steps before the rename
        self._manager.reload()

    def check_held(self) -> None:
        """Raise unless this run still holds the directory; every process must call this.

        Raises:
            LeaseLostError: Another process has taken it over; raised on all processes.
        """
        self._commits.check_held()

    def close(self) -> None:
        """Wait for the current save and end Orbax's threads."""
        self.finish()
        for _ in range(_THREADS):
            with contextlib.suppress(*SAVE_ERRORS):  # of the save whose failure has been logged
                self._manager.close()
                return


def _on_host_or_device(leaf: Any) -> Any:
    """Return an array of NumPy or JAX; one that lies elsewhere, such as in a file, is read."""
    return leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else np.asarray(leaf)
