# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gives states to Orbax with their fingerprints: at once, or lazily in a thread.

at once    the caller waits for the fingerprints and the transfer to the host
lazily     the caller waits for neither; a thread does both on a copy (`capture.py`)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import glob
import importlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath
from etils.epath import gpath

from jaxmoe.checkpoint.capture import copy_state
from jaxmoe.checkpoint.commit import TRASH, LeaseLostError
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.disk import check_local
from jaxmoe.fingerprints import begin_fingerprints
from jaxmoe.host_memory import return_memory

THREAD = "checkpoint save"
"""Name of the thread of a lazy save, without its number."""

_LARGE = 1 << 26
"""Bytes of an array above which each layer is stored in its own chunk."""


SAVE_ERRORS = (OSError, ValueError, RuntimeError, LeaseLostError)
"""Exceptions of a save that failed."""

_LEAD = 0.02
"""Seconds before the thread of a lazy save takes the interpreter from the main thread, which has
the next step to start."""

_PEERS = 600
"""Timeout of a save for the writes of other processes, seconds; below the watchdog's."""


def open_manager(
    directory: Any,
    keep: int,
    before_commit: Callable[[], None] | None,
    pinned_steps: Sequence[int] = (),
) -> ocp.CheckpointManager:
    """Return the Orbax manager of a directory, which exists.

    Args:
        directory: Directory of all steps.
        keep: Number of newest steps to keep.
        before_commit: Called in Orbax's thread after the last write of a step and before its
            commit; None for a manager that only reads.
        pinned_steps: Further steps to keep.
    """
    is_writer = before_commit is not None
    if is_writer:
        _wait_for_all_writes()
    # Processes that are listed wait for each other without devices, hence in any thread.
    processes = set(range(jax.process_count())) if is_writer else None
    policies = ocp.checkpoint_managers
    latest = policies.LatestN(keep)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(
            [latest, policies.CustomSteps(pinned_steps)]
        )
        if is_writer
        else None,
        create=False,
        cleanup_tmp_directories=is_writer,
        read_only=not is_writer,
        save_interval_steps=1 if is_writer else 0,
        todelete_subdir=TRASH if is_writer else None,
        enable_async_checkpointing=is_writer,
        async_options=ocp.AsyncOptions(
            timeout_secs=_PEERS, post_finalization_callback=before_commit
        ),
        multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes),
    )
    return ocp.CheckpointManager(directory, options=options)


class StepWriter:
    """Writes one step at a time through an Orbax manager.

    Args:
        manager: Asynchronous manager, which commits what it has been given.
    """

    def __init__(self, manager: ocp.CheckpointManager):
        self._manager = manager
        self._lazy: Future[None] | None = None
        self._has_written = False

    def write(self, manifest: CheckpointManifest, packed: Any, *, is_lazy: bool) -> None:
        """Begin to write a state; return when it may be donated.

        Every process must call this.

        Args:
            manifest: Manifest without fingerprints.
            packed: Nested dicts of plain arrays.
            is_lazy: Wait neither for the transfer nor for the fingerprints; devices must have
                memory for a copy of the state.

        Raises:
            ReplicasDifferError: Devices hold other bits than their replicas. `join` raises it for
                a lazy save.
        """
        self._has_written = True
        if not is_lazy:
            self._give(manifest, packed, begin_fingerprints(packed)())
            return
        copies = [copy_state(packed)]
        # Processes must start their computations in one order, hence in the main thread.
        prints = begin_fingerprints(copies[0]) if jax.process_count() > 1 else None
        mesh = jax.sharding.get_mesh()

        def run() -> None:
            state = copies.pop()
            time.sleep(_LEAD)
            with contextlib.suppress(*SAVE_ERRORS):  # raised once per thread; `join` has raised it
                self._manager.wait_until_finished()
            # The current mesh is one of the thread, and part of the key of compiled programs.
            with contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh):
                self._give(manifest, state, (prints or begin_fingerprints(state))())

        executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        self._lazy = executor.submit(run)
        executor.shutdown(wait=False)  # the thread ends with its function

    def join(self) -> None:
        """Wait for the current save.

        Raises:
            ReplicasDifferError: See `write`.
            Exception: The save failed.
        """
        lazy = self._lazy
        self._lazy = None
        if lazy is not None:
            lazy.result()
        self._manager.wait_until_finished()
        if self._has_written:
            return_memory()
            self._has_written = False

    def is_writing(self) -> bool:
        """Return whether a save is in progress."""
        is_lazy = self._lazy is not None and not self._lazy.done()
        return is_lazy or self._manager.is_saving_in_progress()

    def _give(self, manifest: CheckpointManifest, packed: Any, prints: dict[str, str]) -> None:
        """Give a state to Orbax; return when it is on the host."""
        manifest = dataclasses.replace(manifest, fingerprints=prints)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(  # pyright: ignore[reportCallIssue]
                packed, save_args=jax.tree.map(_layout_of, packed)
            ),
            manifest=ocp.args.JsonSave(manifest.to_json()),  # pyright: ignore[reportCallIssue]
        )
        self._manager.reload()  # steps that have been deleted, set aside or not committed
        self._manager.save(manifest.step, args=items, force=True)


def _layout_of(leaf: Any) -> ocp.SaveArgs:
    """Return how an array is stored: large stacks of matrices with one chunk per matrix."""
    is_large = leaf.ndim > 2 and leaf.size * leaf.dtype.itemsize > _LARGE
    return ocp.SaveArgs(shard_axes=(0,) if is_large else ())


Result = TypeVar("Result")

_MODULE = "orbax.checkpoint._src.asyncio_utils"
_NAME = "_run_sync_via_new_loop"

_SECONDS = 60.0
"""Timeout of the writes that are in progress when another one fails."""


def _wait_for_all_writes() -> None:
    """Make Orbax wait for all writes of a save that has failed, where it has the function for it.

    Orbax (0.12) runs the writes of a save in an event loop, which it closes at the first error. The
    writes that are still in progress report to the closed loop: each prints a traceback, "Event
    loop is closed", and a thread that waits for one of them waits for ever.
    """
    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError:
        return
    if hasattr(module, _NAME):
        setattr(module, _NAME, run_to_the_end)


def run_to_the_end(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a new event loop, which is closed when all of its tasks have ended.

    Args:
        coroutine: Coroutine to run.

    Returns:
        The result of the coroutine.
    """
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        main = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(main)
        finally:
            tasks = asyncio.all_tasks(loop) - {main}
            if main.done() and tasks:  # not done: a signal has interrupted it
                finished, _ = loop.run_until_complete(asyncio.wait(tasks, timeout=_SECONDS))
                for (
                    task
                ) in finished:  # the first error is raised; asyncio logs others that are unread
                    _ = task.cancelled() or task.exception()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def literal_path(path: Any) -> epath.Path:
    """Return the absolute path of a directory, in which `glob` takes only its argument as pattern.

    Args:
        path: Local directory.

    Raises:
        ValueError: The path is in an object store.
    """
    check_local("directory", path)
    return _LiteralPath(epath.Path(path).expanduser().absolute())


class _LiteralPath(gpath.PosixGPath):
    """Local path; paths derived from it are of this class."""

    def glob(self, pattern: str) -> Iterator[_LiteralPath]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Yield the files below this directory that match."""
        for name in sorted(glob.glob(pattern, root_dir=os.fspath(self))):
            yield self / name
