# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saving and restoring through Orbax: asynchronous, one commit per step.

    <directory>/<step>/state      arrays (parameters, optimiser, router state, randomness, counters)
    <directory>/<step>/manifest   what they are, the config, the data position

Orbax renames the whole step into place when all of it is written: a process killed at any moment
leaves the previous step. A save that fails (a full disk) is reported and the run goes on; the next
save is tried as usual. Old steps are renamed away before they are deleted, so that a listed step is
always whole.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import traverse_util

from jaxmoe.checkpoint.manifest import (
    CheckpointError,
    CheckpointManifest,
    check_target,
    make_manifest,
)
from jaxmoe.checkpoint.tree import SEPARATOR, is_key, pack, unpack
from jaxmoe.configs import to_json

logger = logging.getLogger(__name__)

_SAVE_ERRORS = (OSError, ValueError, RuntimeError)
_TRASH = "trash"


class CheckpointManager:
    """The checkpoints of one run.

    Args:
        directory: holds one directory per step; made when missing.
        keep: newest steps that are kept, at least 2 (the last may be damaged or in flight).
        is_writer: False only reads, and makes nothing.
    """

    def __init__(self, directory: Any, *, keep: int = 3, is_writer: bool = True):
        if keep < 2:
            raise ValueError(
                f"checkpoint.keep={keep} must be at least 2: the last may be in flight"
            )
        self.directory = epath.Path(directory).expanduser().absolute()
        if not is_writer and not self.directory.exists():
            raise CheckpointError(f"{directory} holds no checkpoints: the directory does not exist")
        self._is_writer = is_writer
        self._empty_trash()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep if is_writer else None,
            create=is_writer,
            cleanup_tmp_directories=is_writer,
            read_only=not is_writer,
            todelete_subdir=_TRASH if is_writer else None,
            enable_async_checkpointing=is_writer,
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

    def _empty_trash(self) -> None:
        """Deletes the steps that Orbax has renamed away, which it leaves to others."""
        if self._is_writer and jax.process_index() == 0:
            (self.directory / _TRASH).rmtree(missing_ok=True)

    def _report(self, step: int | None, error: BaseException) -> None:
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        logger.warning("%s was not saved, the run goes on: %s", which, reason)
        for leftover in self.directory.glob("*.orbax-checkpoint-tmp*"):
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
        """The state of a step.

        Args:
            step: a committed step.
            target: the state wanted: arrays, or `jax.ShapeDtypeStruct` with shardings. Each array
                is read straight to where the target has it, on whatever mesh it was saved.

        Raises:
            CheckpointError: no such step, or another state; names each array that differs.
        """
        check_target(self.manifest(step), target, f"{self.directory}/{step}")
        packed = jax.eval_shape(pack, target)
        shardings = pack(jax.tree.map(_sharding_of, target, is_leaf=is_key))
        abstract = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
            packed,
            shardings,
        )
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract)  # pyright: ignore[reportCallIssue]
        )
        restored = self._manager.restore(step, args=items)
        return unpack(restored["state"], target)

    def close(self) -> None:
        """Waits, and ends Orbax's threads."""
        self.finish()
        self._manager.close()


def _sharding_of(leaf: Any) -> Any:
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


def load_checkpoint(directory: Any, *, step: int | None = None, target: Any = None) -> Any:
    """Restores a state.

    Args:
        directory: of the checkpoints of a run.
        step: the newest when None.
        target: the state wanted, see `CheckpointManager.restore`; nested dicts of arrays on the
            default device when None.

    Raises:
        CheckpointError: nothing to restore, no such step, or another state.
    """
    manager = CheckpointManager(directory, is_writer=False)
    try:
        step = manager.latest_step() if step is None else step
        if step is None:
            raise CheckpointError(f"{directory} holds no checkpoints")
        if target is None:
            target = _target_of(manager.manifest(step))
        return manager.restore(step, target)
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
