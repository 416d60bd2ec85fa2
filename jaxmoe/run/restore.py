# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the state that a run begins with, or goes on with after a rollback.

`SOURCES` is the order in which it is looked for; the first source that has a state gives it:

    snapshot       in the memory of the hosts, at least as new as the newest checkpoint
    other workers  a checkpoint of another number of workers that communicate rarely
    checkpoint     the newest valid one
    parts          with `checkpoint.on_lost_stage=average`: an older snapshot, then one of which
                   several processes are lost, then the newest damaged checkpoint
    branch         with `checkpoint.initial_state=all`: a checkpoint of another run, and its step
    initial        with `checkpoint.initial`: the parameters of another run or model
    new            drawn from the seed
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import CheckpointAbandonedError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest, CheckpointsLostError
from jaxmoe.data import Loader, SkippedRows, check_position
from jaxmoe.json_bounds import named
from jaxmoe.messages import say
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import CheckpointConfig
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
from jaxmoe.training.state import TrainState
from sharding.distributed import agree, share


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

    def check_own(self, manifest: CheckpointManifest) -> None:
        """Accept a checkpoint of this run, or of this lineage if the config is not compared.

        Args:
            manifest: Manifest of the checkpoint.

        Raises:
            ValueError: The checkpoint has another config, or `check` refuses it.
        """
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
        search = Search(
            lineage=self,
            assembly=assembly,
            checkpoints=checkpoints,
            snapshots=snapshots,
            shapes=assembly.state_shapes() if target is None else target,
            is_start=target is None,
        )
        for source in SOURCES:
            begun = source(search)
            if begun is not None:
                return begun
        raise AssertionError("the last source always has a state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Where a state is looked for, and what it must fit."""

    lineage: Lineage
    assembly: Assembly
    checkpoints: CheckpointManager
    snapshots: SnapshotStore | None
    """Snapshots of this process; None without any."""
    shapes: Any
    """Shapes and shardings of the state."""
    is_start: bool
    """Whether the run starts; False after a rollback."""

    @property
    def config(self) -> CheckpointConfig:
        """What the run does with checkpoints."""
        return self.assembly.plan.config.checkpoint

    def begun(
        self, step: int, state: TrainState, origin: str | None, source: Source | None = None
    ) -> Begun:
        """Return a state with the data that follow it."""
        assembly = dataclasses.replace(self.assembly, loader=self.lineage.loader)
        return Begun(assembly=assembly, step=step, state=state, origin=origin, source=source)


def from_snapshot(search: Search) -> Begun | None:
    """Return a snapshot at least as new as the newest checkpoint, of which none is read then."""
    snapshots = search.snapshots
    if snapshots is None:
        return None
    newest = agree(search.checkpoints.latest_step() or 0)
    check = search.lineage.check_own
    restored = snapshots.restore_newest(search.shapes, at_least=newest, check=check)
    if restored is not None:
        snapshots.keep_only(restored.step)
        return search.begun(restored.step, restored.state, restored.words)
    if search.config.on_lost_stage == "fail":
        snapshots.keep_only(None)
    return None


def from_other_workers(search: Search) -> Begun | None:
    """Return the newest checkpoint if it has another number of workers than the run."""
    newest = search.checkpoints.latest_step()
    if newest is None or not search.is_start:
        return None
    state = with_other_workers(search.assembly, search.checkpoints, newest, search.shapes)
    if state is None:
        return None
    search.lineage.check_own(search.checkpoints.shared_manifest(newest))
    return search.begun(newest, state, f"step {newest}, with other workers")


def from_checkpoint(search: Search) -> Begun | None:
    """Return the newest valid checkpoint.

    Raises:
        CheckpointsLostError: None is whole, and nothing takes the place of what is lost.
    """
    config, checkpoints = search.config, search.checkpoints
    try:
        restored = checkpoints.restore_newest(
            search.shapes,
            check=search.lineage.check_own,
            is_strict=config.on_damage == "stop",
            counts_steps=True,
        )
    except CheckpointsLostError:
        if config.on_lost_stage == "fail":
            raise
        return None
    if restored is None:
        return None
    if config.initial and search.assembly.plan.model.adapter is None:
        say(f"checkpoint.initial={config.initial} is ignored: the run continues")
    if search.snapshots is not None:
        search.snapshots.keep_only(None)
    step, state = restored
    return search.begun(step, state, f"step {step} from {checkpoints.directory}")


def from_parts(search: Search) -> Begun | None:
    """Return an older snapshot, or a state of which what was lost is replaced."""
    if search.config.on_lost_stage != "average":
        return None
    assembly, snapshots, check = search.assembly, search.snapshots, search.lineage.check_own
    table, state, averaged = assembly.plan.table, assembly.new_state(), None
    if snapshots is not None:
        restored = snapshots.restore_newest(state, check=check)
        if restored is not None:
            snapshots.keep_only(restored.step)
            return search.begun(restored.step, restored.state, restored.words)
        shared = pathlib.Path(search.checkpoints.directory).with_name("snapshots")
        averaged = restore_averaged_snapshot(snapshots, shared, state, table, check)
        snapshots.keep_only(None)
    if averaged is None:
        averaged = restore_averaged(search.checkpoints.damaged_directory, state, table, check)
    if averaged is None:
        return None
    origin = f"step {averaged.step} from {averaged.where}, of which a part was lost"
    begun = search.begun(averaged.step, averaged.state, origin)
    raised = with_raised_rate(begun.assembly, (averaged.step,))
    return dataclasses.replace(begun, assembly=raised, averaged=averaged)


def from_branch(search: Search) -> Begun | None:
    """Return a checkpoint of another run, of which this run is a branch."""
    if search.config.initial_state != "all":
        return None
    source, state = branched_state(search.assembly, search.shapes, search.lineage.check)
    origin = f"step {source.step} from {source.path}, of which this run is a branch"
    return search.begun(source.step, state, origin, source)


def from_initial(search: Search) -> Begun | None:
    """Return a new state with the parameters of another run or model."""
    if search.config.initial is None:
        return None
    source, state = initial_state(search.assembly, search.assembly.new_state())
    return search.begun(0, state, None, source)


def first_state(assembly: Assembly) -> TrainState:
    """Return the state that a run began with, with the parameters of another run if it names one.

    Args:
        assembly: Plan and devices of the run.
    """
    state = assembly.new_state()
    if assembly.plan.config.checkpoint.initial is not None:
        _, state = initial_state(assembly, state)
    return state


def from_seed(search: Search) -> Begun | None:
    """Return a new state."""
    return search.begun(0, search.assembly.new_state(), None)


SOURCES: tuple[Callable[[Search], Begun | None], ...] = (
    from_snapshot,
    from_other_workers,
    from_checkpoint,
    from_parts,
    from_branch,
    from_initial,
    from_seed,
)
"""Sources of a state, in the order in which they are asked; the last always has one."""


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
            windows = directory.skipped()
            with named(directory.skipped_file):
                skipped = SkippedRows.from_json(windows)
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        raise problem or ValueError(
            f"{directory.skipped_file} is damaged, as the first process saw"
        )
    windows = share(np.asarray(skipped.windows, np.int32).ravel(), jax.process_index() == 0)
    return SkippedRows.from_json(windows.reshape(-1, 2).tolist())
