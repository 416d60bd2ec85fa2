# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring through Orbax: asynchronous, one commit per step.

    <directory>/<step>/state      arrays (parameters, optimiser, router state, randomness, counters)
    <directory>/<step>/manifest   what they are, their fingerprints, the config, the data position
    <directory>/<step>/files.json size and checksum of each file
    <directory>/damaged/<step>    steps that were not what had been written, set aside

Orbax renames the whole step into place when all of it is written: a process killed at any moment
leaves the previous step. A save that fails (a full disk) is reported and the run goes on; `is_owed`
says at any step that it must be tried again (`commit.py` has what surrounds a commit). Old steps
are renamed away before they are deleted, so that a listed step is always whole; they are deleted
after the commit of the one that takes their place, and steps set aside do not count among `keep`.

What is restored is verified by default: the files by their checksums before anything is read, the
arrays by their fingerprints afterwards. `restore_newest` sets a damaged step aside and takes the
one before it.
"""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmoe.checkpoint import bounds, checksums
from jaxmoe.checkpoint.commit import TRASH, Commits, Fence, LeaseLostError
from jaxmoe.checkpoint.later_arrays import with_later, without_later
from jaxmoe.checkpoint.manifest import (
    CheckpointAbandonedError,
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    check_fingerprints,
    check_global,
    check_target,
    make_manifest,
    read_manifest,
)
from jaxmoe.checkpoint.reading import (
    Reading,
    array_reader,
    shared_manifest,
    shared_steps,
    target_of,
)
from jaxmoe.state_tree import is_key, pack, unpack
from sharding.distributed import agree

logger = logging.getLogger(__name__)

_SAVE_ERRORS = (OSError, ValueError, RuntimeError, LeaseLostError)
_DAMAGED = "damaged"

_LARGE = 1 << 26
"""Bytes of an array from which on its layers are stored apart."""

_PEERS = 600
"""Seconds that a save waits for the writes of other processes, one of which may have failed: fewer
than a watchdog allows."""

Verify = Literal["full", "files", "off"]
"""What a restore checks: checksums of files and fingerprints of arrays, files alone, or nothing."""


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: holds one directory per step; made when missing.
        keep: newest steps that are kept, at least 2 (the last may be damaged or in flight).
        is_writer: False only reads, and makes nothing.
        verify: what a restore checks.
        fence: raises LeaseLostError once another process writes here; asked before each save, each
            commit and before a step is set aside, on the process that has one.
    """

    def __init__(
        self,
        directory: Any,
        *,
        keep: int = 3,
        is_writer: bool = True,
        verify: Verify = "full",
        fence: Fence | None = None,
    ):
        if keep < 2:
            raise ValueError(
                f"checkpoint.keep={keep} must be at least 2: the last may be in flight"
            )
        self.directory = epath.Path(directory).expanduser().absolute()
        if not is_writer and not self.directory.exists():
            raise CheckpointError(f"{directory} holds no checkpoints: the directory does not exist")
        if lines := bounds.before_opening(pathlib.Path(self.directory)):
            raise CheckpointDamagedError(f"{directory} is damaged: {'; '.join(lines[:5])}")
        self._is_writer, self._verify = is_writer, verify
        self._commits = Commits(self.directory, fence, is_writer=is_writer)
        self._commits.empty_trash()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if is_writer else None,
            create=is_writer,
            cleanup_tmp_directories=is_writer,
            read_only=not is_writer,
            todelete_subdir=TRASH if is_writer else None,
            enable_async_checkpointing=is_writer,
            async_options=ocp.AsyncOptions(
                timeout_secs=_PEERS,
                post_finalization_callback=self._commits.before_commit if is_writer else None,
            ),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Steps that are wholly committed, ascending."""
        self._manager.reload()
        return sorted(
            step
            for step in self._manager.all_steps()
            if (self.directory / str(step) / "manifest").exists()
        )

    def shared_steps(self) -> list[int]:
        """The same as the first process lists them; every process must call this."""
        return shared_steps(self.steps)

    def latest_step(self) -> int | None:
        """Newest committed step."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: Any, *, config: dict[str, Any], data: dict[str, Any] | None = None
    ) -> bool:
        """Starts saving a state; returns when it has been copied and may be donated.

        Args:
            step: names the checkpoint.
            state: any tree of named arrays, all on one mesh.
            config: the run's config as JSON.
            data: data position.

        Returns:
            False when this save, or the one before it that was still being written, failed; the
            reason has been logged.

        Raises:
            LeaseLostError: another process writes to the directory by now; on all processes.
        """
        is_good = not agree(not self.finish())
        is_there = step in self.shared_steps()
        if not is_there:
            check_global(state)
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pack(state)))
        if not self._commits.may_save(step, 0 if is_there else needed):
            return False
        if is_there:
            return is_good
        try:
            manifest = make_manifest(state, step=step, config=config, data=data or {})
            packed = pack(state)
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(  # pyright: ignore[reportCallIssue]
                    packed, save_args=jax.tree.map(_layout_of, packed)
                ),
                manifest=ocp.args.JsonSave(manifest.to_json()),  # pyright: ignore[reportCallIssue]
            )
            self._manager.save(step, args=items, force=True)
            self._commits.pending = step
        except _SAVE_ERRORS as error:
            self._commits.failed(step, error)
            return False
        return is_good

    def finish(self) -> bool:
        """Waits for the save under way; False when it failed, and the reason has been logged.

        True: it is on the disk (see `commit.py` for what that is worth).
        """
        try:
            self._manager.wait_until_finished()
            self._commits.done()
        except _SAVE_ERRORS as error:
            self._commits.failed(None, error)
            return False
        finally:
            self._commits.empty_trash()
        return True

    @property
    def failures(self) -> int:
        """Saves in a row that failed, as far as is known without waiting."""
        if self._commits.pending is not None and not self._manager.is_saving_in_progress():
            self.finish()
        return self._commits.failures

    def is_owed(self) -> bool:
        """Whether the last save has failed; does not wait for one that is still being written."""
        is_bad = self.failures > 0 or self._commits.lost is not None
        return is_bad and self._commits.pending is None

    def manifest(self, step: int) -> CheckpointManifest:
        """What the checkpoint of a step says of itself.

        Raises:
            CheckpointError: there is no such step; lists those there are.
        """
        if step not in self.steps():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.directory} has no checkpoint of step {step} (has: {have})"
            )
        return read_manifest(pathlib.Path(self.directory) / str(step))

    def shared_manifest(self, step: int) -> CheckpointManifest:
        """The same as the first process reads it; every process must call this."""
        return shared_manifest(lambda: self.manifest(step))

    def restore(self, step: int, target: Any) -> Any:
        """The state of a step, verified; every process must call this.

        Args:
            step: a committed step.
            target: the state wanted: arrays, or `jax.ShapeDtypeStruct` with shardings. Each array
                is read straight to where the target has it, on whatever mesh it was saved. None:
                nested dicts of arrays on the default device.

        Raises:
            CheckpointError: no such step, or another state; names each array that differs.
            CheckpointDamagedError: it is not what was written; names files or arrays.
        """
        self.check_files(step)
        return self._read(step, self.shared_manifest(step), target)

    def _read(self, step: int, manifest: CheckpointManifest, target: Any) -> Any:
        """The state of a step whose files have been checked; its arrays are checked here."""
        where = f"{self.directory}/{step}"
        if target is None:
            if reason := bounds.beyond_memory(manifest.arrays):
                raise CheckpointError(f"{where}: {reason}")
            target = target_of(manifest)
        whole, target = target, without_later(manifest, target)
        check_target(manifest, target, where)
        packed = jax.eval_shape(pack, target)
        shardings = pack(jax.tree.map(sharding_of, target, is_leaf=is_key))
        abstract = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            packed,
            shardings,
        )
        arguments = ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
        with Reading(where), array_reader(ocp.StandardCheckpointHandler()) as reader:
            restored = reader.restore(f"{where}/state", args=arguments)
        state = unpack(restored, target)
        if self._verify == "full":
            check_fingerprints(manifest, state, where)
        return with_later(manifest, state, whole, where)

    def restore_newest(
        self,
        target: Any,
        *,
        check: Callable[[CheckpointManifest], None] | None = None,
        is_strict: bool = False,
    ) -> tuple[int, Any] | None:
        """The newest step that is what was written, and its state; None where there are no steps.

        A damaged step is named in a warning and set aside (a reader leaves it where it is), and the
        step before it is tried. Every process must call this.

        Args:
            target: see `restore`.
            check: refuses a manifest with a ValueError of its own, or sets the step aside with
                CheckpointAbandonedError.
            is_strict: raises at the first damaged step.

        Raises:
            CheckpointError: another state, or no step is whole: never a silent start from nothing.
            LeaseLostError: another process writes to the directory by now.
        """
        steps, abandoned = self.shared_steps(), 0
        for step in reversed(steps):
            try:
                self.check_files(step)
                manifest = self.shared_manifest(step)
                if check is not None:
                    check(manifest)
                return step, self._read(step, manifest, target)
            except CheckpointAbandonedError as error:
                self._set_aside(step, error)
                abandoned += 1
            except CheckpointDamagedError as error:
                if is_strict:
                    raise
                self._set_aside(step, error)
        if len(steps) > abandoned:
            raise CheckpointError(
                f"{self.directory}: none of the steps {', '.join(map(str, steps))} is what was"
                " written: start in another directory, or restore a copy"
            )
        return None

    def newest_whole_step(self) -> int | None:
        """The newest step whose files are what was written; every process must call this."""
        for step in reversed(self.shared_steps()):
            try:
                self.check_files(step)
                return step
            except CheckpointDamagedError as error:
                self._set_aside(step, error)
        return None

    def check_files(self, step: int) -> None:
        """Raises CheckpointDamagedError, on all processes, where files are not what was written."""
        lines: list[str] = []
        if jax.process_index() == 0 and step in self.steps():
            lines = self.damage(step)
        if agree(len(lines)):
            shown = "; ".join(lines[:5]) or "as the first process found"
            raise CheckpointDamagedError(
                f"{self.directory}/{step} is damaged: {shown}"
                + (f"; and {len(lines) - 5} more files" if len(lines) > 5 else "")
            )

    def damage(self, step: int) -> list[str]:
        """What is wrong with the files of a step, a line each; empty: nothing that can be seen."""
        try:
            return self._damage(step)
        except OSError as error:  # a bad sector, for instance
            return [f"{error.filename or step}: cannot be read ({error.strerror or error})"]

    def _damage(self, step: int) -> list[str]:
        path = pathlib.Path(self.directory) / str(step)
        has_list = (path / checksums.LIST).exists()
        lines = bounds.places(path) or bounds.texts(path, (checksums.LIST,))
        if has_list and self._verify != "off":
            lines = lines or checksums.damage(path)
        lines = lines or bounds.texts(path)
        if not has_list and self._verify != "off" and not _is_of_schema_1(path):
            lines = lines or checksums.damage(path)
        return lines or bounds.contents(path)

    def _set_aside(self, step: int, error: CheckpointError) -> None:
        logger.warning("%s; the step before it is used", error)
        if not self._is_writer:
            return
        self._commits.check_held()  # and nobody reads the step any more
        if jax.process_index() == 0:
            shelf = self.directory / _DAMAGED
            shelf.mkdir(exist_ok=True)
            names = [str(step), *(f"{step}-{number}" for number in range(2, 1000))]
            free = next(name for name in names if not (shelf / name).exists())
            (self.directory / str(step)).rename(shelf / free)
        agree(0)  # nobody looks before it has moved
        self._manager.reload()

    def check_held(self) -> None:
        """That no other process writes here by now; every process must call this.

        Raises:
            LeaseLostError: on all processes.
        """
        self._commits.check_held()

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self.finish()
        self._manager.close()


def _is_of_schema_1(step: pathlib.Path) -> bool:
    """Whether a step was saved before its files were listed."""
    if (step / checksums.LIST).exists():
        return False
    try:
        return json.loads((step / "manifest" / "metadata").read_text())["schema"] == 1
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def _layout_of(leaf: Any) -> ocp.SaveArgs:
    """How an array is stored: a large stack of matrices so that each can be read alone."""
    is_large = leaf.ndim > 2 and leaf.size * leaf.dtype.itemsize > _LARGE
    return ocp.SaveArgs(shard_axes=(0,) if is_large else ())


def sharding_of(leaf: Any) -> Any:
    """Where a leaf lies; the default device when it does not say."""
    placed = getattr(leaf, "sharding", None)
    return placed or jax.sharding.SingleDeviceSharding(jax.devices()[0])
