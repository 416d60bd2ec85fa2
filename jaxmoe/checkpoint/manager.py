# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring through Orbax: asynchronous, one commit per step.

    <directory>/<step>/state      arrays (parameters, optimiser, router state, randomness, counters)
    <directory>/<step>/manifest   what they are, their fingerprints, the config, the data position
    <directory>/<step>/files.json size and checksum of each file
    <directory>/damaged/<step>    steps that were not what had been written, set aside

Orbax renames the whole step into place when all of it is written: a process killed at any moment
leaves the previous step. A save that fails (a full disk) is reported and the run goes on; the next
save is tried as usual. Old steps are renamed away before they are deleted, so that a listed step is
always whole.

What is restored is verified by default: the files by their checksums before anything is read, the
arrays by their fingerprints afterwards. `restore_newest` sets a damaged step aside and takes the
one before it.
"""

from __future__ import annotations

import json
import logging
import pathlib
import shutil
from collections.abc import Callable
from typing import Any, Literal

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from jaxmoe.checkpoint import checksums
from jaxmoe.checkpoint.manifest import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointManifest,
    check_fingerprints,
    check_target,
    make_manifest,
)
from jaxmoe.checkpoint.tree import SEPARATOR, is_key, pack, unpack
from jaxmoe.configs import to_json
from sharding.distributed import agree

logger = logging.getLogger(__name__)

_SAVE_ERRORS = (OSError, ValueError, RuntimeError)
_TRASH = "trash"
_DAMAGED = "damaged"
_UNCOMMITTED = "*.orbax-checkpoint-tmp*"

Verify = Literal["full", "files", "off"]
"""What a restore checks: checksums of files and fingerprints of arrays, files alone, or nothing."""


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: holds one directory per step; made when missing.
        keep: newest steps that are kept, at least 2 (the last may be damaged or in flight).
        is_writer: False only reads, and makes nothing.
        verify: what a restore checks.
    """

    def __init__(
        self, directory: Any, *, keep: int = 3, is_writer: bool = True, verify: Verify = "full"
    ):
        if keep < 2:
            raise ValueError(
                f"checkpoint.keep={keep} must be at least 2: the last may be in flight"
            )
        self.directory = epath.Path(directory).expanduser().absolute()
        if not is_writer and not self.directory.exists():
            raise CheckpointError(f"{directory} holds no checkpoints: the directory does not exist")
        self._is_writer, self._verify = is_writer, verify
        self._empty_trash()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if is_writer else None,
            create=is_writer,
            cleanup_tmp_directories=is_writer,
            read_only=not is_writer,
            todelete_subdir=_TRASH if is_writer else None,
            enable_async_checkpointing=is_writer,
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._list_files if is_writer else None
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

    def latest_step(self) -> int | None:
        """Newest committed step."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: Any, *, config: dict[str, Any], data: dict[str, Any] | None = None
    ) -> bool:
        """Starts saving a state; returns when it has been copied and may be donated.

        Args:
            step: names the checkpoint.
            state: any tree of named arrays.
            config: the run's config as JSON.
            data: data position.

        Returns:
            False when this save, or the one before it that was still being written, failed; the
            reason has been logged.
        """
        is_good = self.finish()
        if step in self.steps():
            return is_good
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pack(state)))
        try:
            free = shutil.disk_usage(self.directory).free
            if free < 1.2 * needed:
                raise OSError(
                    f"{free / 1e6:.1f} MB are free, about {1.2 * needed / 1e6:.1f} MB are needed"
                )
            manifest = make_manifest(state, step=step, config=config, data=data or {})
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(pack(state)),  # pyright: ignore[reportCallIssue]
                manifest=ocp.args.JsonSave(manifest.to_json()),  # pyright: ignore[reportCallIssue]
            )
            self._manager.save(step, args=items, force=True)
        except _SAVE_ERRORS as error:
            self._report(step, error)
            return False
        return is_good

    def finish(self) -> bool:
        """Waits for the save under way; False when it failed, and the reason has been logged."""
        try:
            self._manager.wait_until_finished()
        except _SAVE_ERRORS as error:
            self._report(None, error)
            return False
        finally:
            self._empty_trash()
        return True

    def _list_files(self) -> None:
        """Notes the files that are about to be committed; Orbax calls it, in its own thread."""
        if jax.process_index() == 0:
            for path in pathlib.Path(self.directory).glob(_UNCOMMITTED):
                checksums.write_list(path)

    def _empty_trash(self) -> None:
        """Deletes the steps that Orbax has renamed away, which it leaves to others."""
        if self._is_writer and jax.process_index() == 0:
            (self.directory / _TRASH).rmtree(missing_ok=True)

    def _report(self, step: int | None, error: BaseException) -> None:
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        logger.warning("%s was not saved, the run goes on: %s", which, reason)
        for leftover in self.directory.glob(_UNCOMMITTED):
            leftover.rmtree(missing_ok=True)

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
        items = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return CheckpointManifest.from_json(restored["manifest"], f"{self.directory}/{step}")

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
        return self._read(step, target)

    def _read(self, step: int, target: Any) -> Any:
        """The state of a step whose files have been checked; its arrays are checked here."""
        where, manifest = f"{self.directory}/{step}", self.manifest(step)
        target = _target_of(manifest) if target is None else target
        check_target(manifest, target, where)
        packed = jax.eval_shape(pack, target)
        shardings = pack(jax.tree.map(sharding_of, target, is_leaf=is_key))
        abstract = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            packed,
            shardings,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
        )
        restored = self._manager.restore(step, args=items)
        state = unpack(restored["state"], target)
        if self._verify == "full":
            check_fingerprints(manifest, state, where)
        return state

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
            check: refuses a manifest with a ValueError of its own.
            is_strict: raises at the first damaged step.

        Raises:
            CheckpointError: another state, or no step is whole: never a silent start from nothing.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                self.check_files(step)
                if check is not None:
                    check(self.manifest(step))
                return step, self._read(step, target)
            except CheckpointDamagedError as error:
                if is_strict:
                    raise
                self._set_aside(step, error)
        if steps:
            raise CheckpointError(
                f"{self.directory}: none of the steps {', '.join(map(str, steps))} is what was"
                " written: start in another directory, or restore a copy"
            )
        return None

    def newest_whole_step(self) -> int | None:
        """The newest step whose files are what was written; every process must call this."""
        for step in reversed(self.steps()):
            try:
                self.check_files(step)
                return step
            except CheckpointDamagedError as error:
                self._set_aside(step, error)
        return None

    def check_files(self, step: int) -> None:
        """Raises CheckpointDamagedError, on all processes, where files are not what was written."""
        lines: list[str] = []
        if jax.process_index() == 0 and self._verify != "off" and step in self.steps():
            lines = self.damage(step)
        if agree(len(lines)):
            shown = "; ".join(lines[:5]) or "as the first process found"
            raise CheckpointDamagedError(
                f"{self.directory}/{step} is damaged: {shown}"
                + (f"; and {len(lines) - 5} more files" if len(lines) > 5 else "")
            )

    def damage(self, step: int) -> list[str]:
        """What is wrong with the files of a step, a line each; empty: nothing that can be seen."""
        path = pathlib.Path(self.directory) / str(step)
        lines = [f"{name}: a link, which no checkpoint has" for name in checksums.links(path)]
        return lines or ([] if _is_of_schema_1(path) else checksums.damage(path))

    def _set_aside(self, step: int, error: CheckpointDamagedError) -> None:
        logger.warning("%s; the step before it is used", error)
        if not self._is_writer:
            return
        if jax.process_index() == 0:
            shelf = self.directory / _DAMAGED
            shelf.mkdir(exist_ok=True)
            names = [str(step), *(f"{step}-{number}" for number in range(2, 1000))]
            free = next(name for name in names if not (shelf / name).exists())
            (self.directory / str(step)).rename(shelf / free)
        agree(0)  # nobody looks before it has moved
        self._manager.reload()

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


def sharding_of(leaf: Any) -> Any:
    """Where a leaf lies; the default device when it does not say."""
    placed = getattr(leaf, "sharding", None)
    return placed or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def save_checkpoint(
    directory: Any, state: Any, *, step: int, config: Any, data: dict[str, Any] | None = None
) -> None:
    """Saves one state and waits until it is committed.

    Args:
        directory: of all checkpoints of a run; the state goes to `<directory>/<step>`.
        state: any tree of named arrays, a `TrainState` for instance.
        step: names the checkpoint.
        config: a config of ours, or a JSON object.
        data: data position.

    Raises:
        CheckpointError: the step exists, or it could not be written.
    """
    manager = CheckpointManager(directory, keep=1_000_000)
    try:
        if step in manager.steps():
            raise CheckpointError(f"{directory} already has a checkpoint of step {step}")
        given = config if isinstance(config, dict) else to_json(config)
        is_saved = manager.save(step, state, config=given, data=data) and manager.finish()
    finally:
        manager.close()
    if not is_saved:
        raise CheckpointError(f"the checkpoint of step {step} was not saved in {directory}")


def load_checkpoint(
    directory: Any, *, step: int | None = None, target: Any = None, verify: Verify = "full"
) -> Any:
    """Restores a state.

    Args:
        directory: of the checkpoints of a run.
        step: the newest that is what was written when None.
        target: the state wanted, see `CheckpointManager.restore`; nested dicts of arrays on the
            default device when None.
        verify: what is checked.

    Raises:
        CheckpointError: nothing to restore, no such step, another state, or a damaged one.
    """
    manager = CheckpointManager(directory, is_writer=False, verify=verify)
    try:
        if step is not None:
            return manager.restore(step, target)
        found = manager.restore_newest(target)
        if found is None:
            raise CheckpointError(f"{directory} holds no checkpoints")
        return found[1]
    finally:
        manager.close()


def _target_of(manifest: CheckpointManifest) -> dict[str, Any]:
    """The tree that a manifest describes; random keys as keys of the default generator."""
    keys = jax.eval_shape(lambda: jax.random.key(0))
    flat = {
        path: jax.ShapeDtypeStruct(
            tuple(array["shape"][:-1]) if array["dtype"] == "key" else tuple(array["shape"]),
            keys.dtype if array["dtype"] == "key" else array["dtype"],
        )
        for path, array in manifest.arrays.items()
    }
    return traverse_util.unflatten_dict(flat, sep=SEPARATOR)
