# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Snapshots`: the state of a run in the memory of its hosts.

The supervisor (`experiments/launch/supervise.py`) names the directory of a process's snapshots in
$JAXMOE_SNAPSHOTS and deletes it at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxmoe.configs import fingerprint, to_json
from jaxmoe.contrib.survival.recovery import (
    CheckFreeConfig,
    begun_with,
    restore_averaged_snapshot,
)
from jaxmoe.contrib.survival.snapshot_store import Restored, SnapshotStore
from jaxmoe.layers.context import require_positive
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FREE_FIELDS, PretrainConfig, RunPartConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.restore import Place, PlacedSource, Search, StartingPoint
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.training.hooks import Hook
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import CHECKPOINT
from sharding.distributed import agree, gather

logger = logging.getLogger(__name__)


def open_snapshots(assembly: Assembly, directory: RunDirectory) -> SnapshotStore | None:
    """Return the snapshots of this process; None if they would not be kept.

    Args:
        assembly: Plan, devices and data of the run.
        directory: Run directory; snapshots of other runs are ignored.
    """
    where = os.environ.get(SNAPSHOTS, "")
    has = gather(np.asarray([bool(where)], np.int32)).reshape(-1)
    if not has.all():
        if jax.process_index() == 0:
            lacking = f"; {SNAPSHOTS} is not set for {int((has == 0).sum())} processes"
            logger.warning(
                "the part snapshots keeps nothing: start the run with `jaxmoe launch"
                " --supervise`, which keeps snapshots in memory%s",
                lacking if has.any() else "",
            )
        return None
    return SnapshotStore(
        where, run=f"{directory.path.absolute()} {_decisive(assembly.plan.config)}"
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotsConfig(RunPartConfig):
    """Keeps the state in host memory, with parity: restarted processes continue from there.

    They need a supervisor, and continue even if one host is lost.
    """

    name: ClassVar[str] = "snapshots"

    every: int = 10
    """Steps between snapshots."""

    def __post_init__(self):
        require_positive(self.name, self, "every")

    def build(self, directory: RunDirectory, supervision: Supervision) -> Snapshots:
        """Return the part."""
        del supervision
        return Snapshots(self.every, directory)


class Snapshots(RunPart):
    """Keeps snapshots every few steps, from which processes restarted by a supervisor continue.

    Args:
        every: Steps between snapshots.
        directory: Run directory.
    """

    def __init__(self, every: int, directory: RunDirectory):
        self._every = every
        self._directory = directory
        self._averages = False
        self._store: SnapshotStore | None = None
        self._restored: int | None = None

    def prepare(self, assembly: Assembly) -> Assembly:
        """Open the snapshots of this process."""
        self._averages = assembly.plan.config.part(CheckFreeConfig.name) is not None
        self._store = open_snapshots(assembly, self._directory)
        return assembly

    def sources(self) -> Sequence[PlacedSource]:
        """Return the snapshots, if any are kept."""
        if self._store is None:
            return ()
        newest = (Place.NEWER, functools.partial(self._newest, self._store))
        older = (Place.LOST, functools.partial(self._older, self._store))
        return (newest, older) if self._averages else (newest,)

    def restore(self, start: StartingPoint) -> None:
        """Delete the snapshots, unless the run begins with one."""
        del start
        if self._store is not None and self._restored is None:
            self._store.keep_only(None)

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return the hook that keeps snapshots, with the metrics of their steps on disk."""
        if self._store is None:
            return ()
        config = assembly.plan.config
        hook = SnapshotHook(
            self._store,
            config=to_json(dataclasses.replace(config, model=assembly.plan.model)),
            position=assembly.loader.position,
            every=self._every,
            last_step=config.training.steps,
            before=watches.reporter.flush,
        )
        return (watches.time_hook(hook, CHECKPOINT),)

    def end(self, step: int, status: str) -> None:
        """Wait for the snapshot that is written; after refused steps delete all."""
        del step
        self.close()
        if self._store is not None and status == "diverged":
            self._store.keep_only(None)

    def close(self) -> None:
        """Wait for the snapshot that is written."""
        if self._store is not None:
            self._store.finish()

    def _newest(self, store: SnapshotStore, search: Search) -> StartingPoint | None:
        """Return a snapshot at least as new as the newest checkpoint, of which none is read then.

        A run that goes back has deleted its snapshots.
        """
        if not search.is_start:
            return None
        newest = agree(search.checkpoints.latest_step() or 0)
        check = search.continuation.check_own
        restored = store.restore_newest(search.shapes, at_least=newest, check=check)
        if restored is not None:
            return self._begin_from(store, search, restored)
        if not self._averages:
            store.keep_only(None)
        return None

    def _older(self, store: SnapshotStore, search: Search) -> StartingPoint | None:
        """Return a snapshot older than checkpoints that are lost, or one that lost processes."""
        if not search.is_start:
            return None
        state = search.assembly.new_state()
        check = search.continuation.check_own
        restored = store.restore_newest(state, check=check)
        if restored is not None:
            return self._begin_from(store, search, restored)
        shared = pathlib.Path(search.checkpoints.directory).with_name("snapshots")
        table = search.assembly.plan.table
        averaged = restore_averaged_snapshot(store, shared, state, table, check)
        store.keep_only(None)
        return None if averaged is None else begun_with(search, averaged)

    def _begin_from(
        self, store: SnapshotStore, search: Search, restored: Restored
    ) -> StartingPoint:
        """Return the state of a snapshot, and keep no other."""
        self._restored = restored.step
        store.keep_only(restored.step)
        return search.with_data(restored.step, restored.state, restored.words)


class SnapshotHook:
    """Saves a snapshot every few steps, except after the last, when a checkpoint is saved.

    Args:
        store: Snapshots of this process.
        config: Config of the run as JSON.
        position: Data position after a number of steps.
        every: Steps between snapshots.
        last_step: Last step of the run.
        before: Called before each snapshot, to flush what belongs to its steps.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        last_step: int,
        before: Callable[[], None],
    ):
        self._store = store
        self._config = config
        self._position = position
        self._every = every
        self._last_step = last_step
        self._before = before

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every` and not the last."""
        return step % self._every == 0 and step < self._last_step

    def run(self, step: int, state: TrainState) -> None:
        """Copy the state; writing continues in the background."""
        self._before()
        self._store.save(step, state, config=self._config, data=self._position(step))


def _decisive(config: PretrainConfig) -> str:
    """Return the fingerprint of the fields that may not change within a run."""
    free = {field: getattr(PretrainConfig(), field) for field in FREE_FIELDS if "." not in field}
    return fingerprint(dataclasses.replace(config, **free))
