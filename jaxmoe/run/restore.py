# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Restores the state of a run from a snapshot or a checkpoint, or creates a new one.

A snapshot at least as new as the newest checkpoint is used, and no checkpoint is read. Where
neither is whole, `checkpoint.on_lost_stage=average` takes an older snapshot, then one of which
several processes are lost, then the newest damaged checkpoint. The supervisor
(`experiments/launch/supervise.py`) names the directory of a process's snapshots in
$JAXMOE_SNAPSHOTS and deletes it at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import CheckpointAbandonedError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest, CheckpointsLostError
from jaxmoe.configs import fingerprint, to_json
from jaxmoe.data import Loader, SkippedRows, check_position
from jaxmoe.messages import say
from jaxmoe.resilience.hooks import SnapshotHook
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.lineage import Source
from jaxmoe.run.provenance.warm_start import branched_state, initial_state
from jaxmoe.run.recovery import (
    Averaged,
    restore_averaged,
    restore_averaged_snapshot,
    with_raised_rate,
)
from jaxmoe.run.replicas.workers import with_other_workers
from jaxmoe.run.reporter import Reporter
from jaxmoe.training.state import TrainState
from sharding.distributed import agree, gather, share

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Begun:
    """State from which a run, or the part after a rollback, begins."""

    assembly: Assembly
    """Assembly whose loader continues with the data that follow."""
    step: int
    """Number of steps already done."""
    state: TrainState
    origin: str | None
    """Description of the source of the state; None for a new state."""
    source: Source | None = None
    """Checkpoint of another run that the state is from; None for others."""
    averaged: Averaged | None = None
    """What was replaced in the state, of which files were lost; None for others."""


class Lineage:
    """Checkpoints that a run may continue from, and the data that follow each.

    Args:
        loader: Loader of the run.
        skipped: Rows that the run has skipped, as recorded in skipped.json.
        check_config: Function that raises ValueError for a checkpoint of this run with another
            config; None where the config is that of the steps before, as after a rollback.
    """

    def __init__(
        self,
        loader: Loader,
        skipped: SkippedRows,
        check_config: Callable[[CheckpointManifest], None] | None = None,
    ):
        self._skipped, self._check_config = skipped, check_config
        self.loader = dataclasses.replace(loader, skipped=skipped)
        """Loader that continues the checkpoint checked last, or a new run."""

    def check(self, manifest: CheckpointManifest) -> None:
        """Accept a checkpoint of this lineage; for `CheckpointManager.restore_newest`.

        Args:
            manifest: Manifest of the checkpoint.

        Raises:
            CheckpointAbandonedError: The checkpoint has read rows that were skipped since.
            DataError: The checkpoint was trained on other data.
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

    def _check_own(self, manifest: CheckpointManifest) -> None:
        """Accept a checkpoint of this run, or of this lineage if the config is not compared."""
        if self._check_config is not None:
            self._check_config(manifest)
        self.check(manifest)

    def restore_or_start(
        self,
        assembly: Assembly,
        checkpoints: CheckpointManager,
        *,
        snapshots: SnapshotStore | None = None,
        target: Any = None,
    ) -> Begun:
        """Return the newest valid state of this lineage, or a new one.

        Args:
            assembly: Plan, devices and data of the run.
            checkpoints: Checkpoint manager of the run.
            snapshots: Snapshots of this process; None without any.
            target: Shapes and shardings to restore to; those of a new state when None. A new state
                is drawn only where none is restored: the devices may hold but one.
        """
        config = assembly.plan.config.checkpoint
        wanted = assembly.state_shapes() if target is None else target
        if snapshots is not None:
            newest = agree(checkpoints.latest_step() or 0)
            kept = snapshots.restore_newest(wanted, at_least=newest, check=self._check_own)
            if kept is not None or config.on_lost_stage == "fail":
                snapshots.keep_only(None if kept is None else kept.step)
            if kept is not None:
                return self._begun(assembly, kept.step, kept.state, kept.words)
        if (newest := checkpoints.latest_step()) is not None and target is None:
            other = with_other_workers(assembly, checkpoints, newest, wanted)
            if other is not None:
                self._check_own(checkpoints.shared_manifest(newest))
                return self._begun(assembly, newest, other, f"step {newest}, with other workers")
        try:
            found = checkpoints.restore_newest(
                wanted,
                check=self._check_own,
                is_strict=config.on_damage == "stop",
                counts_steps=True,
            )
        except CheckpointsLostError:
            if config.on_lost_stage == "fail":
                raise
            found = None
        if found is not None:
            if (left := config.initial) and assembly.plan.model.adapter is None:
                say(f"checkpoint.initial={left} is ignored: the run continues")
            if snapshots is not None:
                snapshots.keep_only(None)
            return self._begun(assembly, *found, f"step {found[0]} from {checkpoints.directory}")
        if config.on_lost_stage == "average":
            state = assembly.new_state()
            if (begun := self._averaged(assembly, checkpoints, snapshots, state)) is not None:
                return begun
            del state
        if config.initial_state == "all":
            source, state = branched_state(assembly, wanted, self.check)
            origin = f"step {source.step} from {source.path}, of which this run is a branch"
            return self._begun(assembly, source.step, state, origin, source)
        state = assembly.new_state()
        if config.initial is None:
            return self._begun(assembly, 0, state, None)
        source, state = initial_state(assembly, state)
        return self._begun(assembly, 0, state, None, source)

    def _averaged(
        self,
        assembly: Assembly,
        checkpoints: CheckpointManager,
        snapshots: SnapshotStore | None,
        state: TrainState,
    ) -> Begun | None:
        """Return a snapshot, or a state with its lost parts replaced; None if nothing was saved."""
        averaged, table, shelf = None, assembly.plan.table, checkpoints.damaged_directory
        if snapshots is not None:
            # Those older than the checkpoints.
            kept = snapshots.restore_newest(state, check=self._check_own)
            if kept is not None:
                snapshots.keep_only(kept.step)
                return self._begun(assembly, kept.step, kept.state, kept.words)
            shared = pathlib.Path(checkpoints.directory).with_name("snapshots")
            averaged = restore_averaged_snapshot(snapshots, shared, state, table, self._check_own)
            snapshots.keep_only(None)
        if averaged is None:
            averaged = restore_averaged(shelf, state, table, self._check_own)
        if averaged is None:
            return None
        origin = f"step {averaged.step} from {averaged.where}, of which a part was lost"
        begun = self._begun(assembly, averaged.step, averaged.state, origin)
        raised = with_raised_rate(begun.assembly, (averaged.step,))
        return dataclasses.replace(begun, assembly=raised, averaged=averaged)

    def _begun(
        self,
        assembly: Assembly,
        step: int,
        state: TrainState,
        origin: str | None,
        source: Source | None = None,
    ) -> Begun:
        assembly = dataclasses.replace(assembly, loader=self.loader)
        return Begun(assembly=assembly, step=step, state=state, origin=origin, source=source)


def read_skipped(directory: RunDirectory) -> SkippedRows:
    """Return the rows that a run has skipped; every process must call this.

    Args:
        directory: Run directory; the first process reads it.

    Raises:
        ValueError: The file is damaged.
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
    """Return the snapshots of this process; None if they are off or would not be kept.

    Args:
        assembly: Plan, devices and data of the run.
        directory: Run directory; snapshots of other runs are ignored.
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
                " experiments.launch --supervise`, which keeps snapshots in memory%s",
                config.checkpoint.snapshot_every,
                lacking if has.any() else "",
            )
        return None
    return SnapshotStore(where, run=f"{directory.path.absolute()} {_decisive(config)}")


def make_snapshots(
    assembly: Assembly, store: SnapshotStore | None, reporter: Reporter
) -> SnapshotHook | None:
    """Return the hook that keeps snapshots; None without a store.

    Args:
        assembly: Plan, devices and data of the run.
        store: Snapshots of this process.
        reporter: Reporter whose files are flushed before every snapshot.
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
    """Return the fingerprint of the fields that may not change within a run."""
    free = {field: getattr(PretrainConfig(), field) for field in FREE_FIELDS if "." not in field}
    return fingerprint(dataclasses.replace(config, **free))
