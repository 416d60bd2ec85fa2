# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Where the state of a run comes from: snapshots in memory, a checkpoint, or new; and its data.

A snapshot that is at least as new as the newest checkpoint wins: then nothing of the checkpoints is
read. The directory of a process's snapshots comes from the supervisor, in $JAXMOE_SNAPSHOTS
(`experiments/launch/supervise.py`), which deletes it at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import CheckpointAbandonedError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest
from jaxmoe.configs import fingerprint, to_json
from jaxmoe.data import Loader, SkippedRows, check_position
from jaxmoe.messages import say
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.resilience.snapshot_hook import SnapshotHook
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from jaxmoe.run.warm_start import initial_state
from jaxmoe.training.state import TrainState
from sharding.distributed import agree, gather, share

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """Where a run, or what follows a rollback, begins."""

    assembly: Assembly
    """With the data that follow."""
    step: int
    """Done before."""
    state: TrainState
    origin: str | None
    """In words where the state came from; None: it is new."""


class Lineage:
    """Which checkpoints a run continues from, and what it then reads.

    Args:
        loader: of the run.
        skipped: what the run has jumped, as its file says.
    """

    def __init__(self, loader: Loader, skipped: SkippedRows):
        self._skipped = skipped
        self.loader = dataclasses.replace(loader, skipped=skipped)
        """Of the checkpoint that was checked last; before any, of a new run."""

    def check(self, manifest: CheckpointManifest) -> None:
        """For `CheckpointManager.restore_newest`.

        Raises:
            CheckpointAbandonedError: it has read rows that the run has jumped since.
            DataError: it was trained on other data.
        """
        saved = SkippedRows.from_json(manifest.data.get("skipped", []))
        skipped = self._skipped.continued(saved, manifest.step)
        if skipped is None:
            raise CheckpointAbandonedError(
                f"the checkpoint of step {manifest.step} has read rows that the run has jumped"
                " since (skipped.json): it is set aside"
            )
        self.loader = dataclasses.replace(self.loader, skipped=skipped)
        check_position(manifest.data, self.loader.position(manifest.step))

    def restore_or_start(
        self,
        assembly: Assembly,
        checkpoints: CheckpointManager,
        *,
        snapshots: SnapshotStore | None = None,
        target: Any = None,
    ) -> Begun:
        """The newest state that is whole and of this lineage, or a new one, which may have the
        parameters of another run.

        Args:
            assembly: of the run.
            checkpoints: of the run.
            snapshots: of this process; None: they are not asked.
            target: what to restore to; a new state when None.
        """
        state = assembly.new_state() if target is None else None
        wanted = state if target is None else target
        if snapshots is not None:
            newest = agree(checkpoints.latest_step() or 0)
            kept = snapshots.restore_newest(wanted, at_least=newest, check=self.check)
            snapshots.keep_only(None if kept is None else kept.step)
            if kept is not None:
                return self._begun(assembly, kept.step, kept.state, kept.words)
        found = checkpoints.restore_newest(
            wanted,
            check=self.check,
            is_strict=assembly.plan.config.checkpoint.on_damage == "stop",
        )
        if found is not None:
            if left := assembly.plan.config.checkpoint.initial:
                say(f"checkpoint.initial={left} is left aside: the run continues")
            return self._begun(assembly, *found, f"step {found[0]} from {checkpoints.directory}")
        state = assembly.new_state() if state is None else state
        return self._begun(assembly, 0, initial_state(assembly, state), None)

    def _begun(self, assembly: Assembly, step: int, state: TrainState, origin: str | None) -> Begun:
        assembly = dataclasses.replace(assembly, loader=self.loader)
        return Begun(assembly=assembly, step=step, state=state, origin=origin)


def read_skipped(directory: RunDirectory) -> SkippedRows:
    """What the run has jumped, by its file; every process must call this, and the first reads.

    Raises:
        ValueError: the file is damaged.
    """
    skipped, problem = SkippedRows(), None
    if jax.process_index() == 0:
        try:
            skipped = SkippedRows.from_json(directory.skipped())
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        raise problem or ValueError(
            f"{directory.skipped_file} is damaged, as the first process saw"
        )
    windows = share(np.asarray(skipped.windows, np.int32).ravel(), jax.process_index() == 0)
    return SkippedRows.from_json(windows.reshape(-1, 2).tolist())


def open_snapshots(assembly: Assembly, directory: RunDirectory) -> SnapshotStore | None:
    """This process's snapshots; None where none are wanted, or nobody would keep them.

    Args:
        assembly: what runs.
        directory: of the run: snapshots of another one are not used.
    """
    config = assembly.plan.config
    if not config.checkpoint.snapshot_every:
        return None
    where = os.environ.get(SNAPSHOTS, "")
    has = gather(np.asarray([bool(where)], np.int32)).reshape(-1)
    if not has.all():
        if jax.process_index() == 0:
            lacking = f"; {SNAPSHOTS} is not set for {int((has == 0).sum())} processes"
            logger.warning(
                "checkpoint.snapshot_every=%d keeps nothing: start the run with `python -m"
                " experiments.launch --supervise`, whose memory outlives it%s",
                config.checkpoint.snapshot_every,
                lacking if has.any() else "",
            )
        return None
    return SnapshotStore(where, run=f"{directory.path.absolute()} {_decisive(config)}")


def make_snapshots(
    assembly: Assembly, store: SnapshotStore | None, reporter: Reporter
) -> SnapshotHook | None:
    """Keeps snapshots in the loop.

    Args:
        assembly: what runs.
        store: where to; None: nowhere.
        reporter: whose files belong to the steps that are kept.
    """
    if store is None:
        return None
    config = assembly.plan.config
    return SnapshotHook(
        store,
        config=to_json(dataclasses.replace(config, model=assembly.plan.model)),
        position=assembly.loader.position,
        every=config.checkpoint.snapshot_every,
        last_step=config.training.steps,
        before=reporter.flush,
    )


def _decisive(config: PretrainConfig) -> str:
    """The fingerprint of what may not change within a run; where it runs, the arrays tell."""
    free = {field: getattr(PretrainConfig(), field) for field in FREE_FIELDS if "." not in field}
    return fingerprint(dataclasses.replace(config, **free))
