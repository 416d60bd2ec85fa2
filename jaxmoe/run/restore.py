# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Finds the state that a run begins with, or goes on with after a rollback.

`Place` is the order in which it is looked for; the first source that has a state gives it:

    newer          what parts of the run keep, at least as new as the newest checkpoint
    checkpoint     the newest valid one; before it, what a part makes of one that does not fit
    lost           what parts of the run make of checkpoints of which none is whole
    another run    with `checkpoint.initial.state=all`: a checkpoint of another run, and its step;
                   with `checkpoint.initial`: the parameters of another run or model
    new            drawn from the seed
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmoe.checkpoint import CheckpointAbandonedError, CheckpointManager
from jaxmoe.checkpoint.manifest import CheckpointManifest, CheckpointsLostError
from jaxmoe.data import Loader, SkippedRows, check_position
from jaxmoe.json_bounds import name_file
from jaxmoe.messages import say
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import CheckpointConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.provenance.lineage import LineageSource
from jaxmoe.run.provenance.warm_start import branched_state, initial_state
from jaxmoe.training.state import TrainState
from sharding.distributed import on_first, share


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """State from which a run, or the part after a rollback, begins."""

    assembly: Assembly
    """Assembly whose loader continues with the data that follow."""
    step: int
    """Number of steps already done."""
    state: TrainState
    origin: str | None
    """Description of the source of the state; None for a new state."""
    source: LineageSource | None = None
    """Checkpoint of another run that the state is from; None for others."""
    changes: tuple[str, ...] = ()
    """What was replaced in the state because it was lost, as text."""


class Place(enum.IntEnum):
    """Place of a source of a state; of sources with one place those of parts come first."""

    NEWER = 0
    CHECKPOINT = 1
    LOST = 2
    ANOTHER_RUN = 3
    NEW = 4


class Continuation:
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
        self._skipped = skipped
        self._check_config = check_config
        self.loader = dataclasses.replace(loader, skipped=skipped)
        """Loader that continues the checkpoint checked last, or a new run."""

    def check(self, manifest: CheckpointManifest) -> None:
        """Accept a checkpoint to continue from; for `CheckpointManager.restore_newest`.

        Args:
            manifest: Manifest of the checkpoint.

        Raises:
            CheckpointAbandonedError: The checkpoint has read rows that were skipped since.
            DataError: The checkpoint was trained on other data.
        """
        saved = SkippedRows.from_json(manifest.data.get("skipped", []))
        skipped = self._skipped.resume(saved, manifest.step)
        if skipped is None:
            raise CheckpointAbandonedError(
                f"the checkpoint of step {manifest.step} has read rows that the run has jumped"
                " since (skipped.json): it is set aside"
            )
        self.loader = dataclasses.replace(self.loader, skipped=skipped)
        check_position(manifest.data, self.loader.position(manifest.step))

    def check_own(self, manifest: CheckpointManifest) -> None:
        """Accept a checkpoint of this run, or any that it may continue if configs are not compared.

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
        sources: Sequence[PlacedSource] = (),
        target: Any = None,
    ) -> StartingPoint:
        """Return the newest valid state that the run may continue from, or a new one.

        Args:
            assembly: Plan, devices and data of the run.
            checkpoints: Checkpoint manager of the run.
            sources: Sources of the parts of the run.
            target: Shapes and shardings to restore to; those of a new state when None. A new state
                is drawn only where none is restored: the devices may hold but one.
        """
        search = Search(
            continuation=self,
            assembly=assembly,
            checkpoints=checkpoints,
            shapes=assembly.state_shapes() if target is None else target,
            is_start=target is None,
            replaces_lost=any(place is Place.LOST for place, _ in sources),
        )
        for _, source in sorted((*sources, *SOURCES), key=lambda source: source[0]):
            start = source(search)
            if start is not None:
                return start
        raise AssertionError("the last source always has a state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """Where a state is looked for, and what it must fit."""

    continuation: Continuation
    assembly: Assembly
    checkpoints: CheckpointManager
    shapes: Any
    """Shapes and shardings of the state."""
    is_start: bool
    """Whether the run starts; False after a rollback."""
    replaces_lost: bool = False
    """Whether a source makes something of checkpoints of which none is whole."""

    @property
    def config(self) -> CheckpointConfig:
        """What the run does with checkpoints."""
        return self.assembly.plan.config.checkpoint

    def with_data(
        self, step: int, state: TrainState, origin: str | None, source: LineageSource | None = None
    ) -> StartingPoint:
        """Return a state with the data that follow it."""
        assembly = dataclasses.replace(self.assembly, loader=self.continuation.loader)
        return StartingPoint(
            assembly=assembly, step=step, state=state, origin=origin, source=source
        )


def from_checkpoint(search: Search) -> StartingPoint | None:
    """Return the newest valid checkpoint.

    Raises:
        CheckpointsLostError: None is whole, and nothing takes the place of what is lost.
    """
    config = search.config
    checkpoints = search.checkpoints
    try:
        restored = checkpoints.restore_newest(
            search.shapes,
            check=search.continuation.check_own,
            is_strict=config.safeguards.on_damage == "stop",
            counts_steps=True,
        )
    except CheckpointsLostError:
        if not search.replaces_lost:
            raise
        return None
    if restored is None:
        return None
    if config.initial and search.assembly.plan.model.adapter is None:
        say(f"checkpoint.initial.path={config.initial_path} is ignored: the run continues")
    step, state = restored
    return search.with_data(step, state, f"step {step} from {checkpoints.directory}")


def from_branch(search: Search) -> StartingPoint | None:
    """Return a checkpoint of another run, of which this run is a branch."""
    initial = search.config.initial
    if initial is None or initial.state != "all":
        return None
    source, state = branched_state(search.assembly, search.shapes, search.continuation.check)
    origin = f"step {source.step} from {source.path}, of which this run is a branch"
    return search.with_data(source.step, state, origin, source)


def from_initial(search: Search) -> StartingPoint | None:
    """Return a new state with the parameters of another run or model."""
    if search.config.initial is None:
        return None
    source, state = initial_state(search.assembly, search.assembly.new_state())
    return search.with_data(0, state, None, source)


def first_state(assembly: Assembly) -> TrainState:
    """Return the state that a run began with, with the parameters of another run if it names one.

    Args:
        assembly: Plan and devices of the run.
    """
    state = assembly.new_state()
    if assembly.plan.config.checkpoint.initial is not None:
        _, state = initial_state(assembly, state)
    return state


def from_seed(search: Search) -> StartingPoint | None:
    """Return a new state."""
    return search.with_data(0, search.assembly.new_state(), None)


PlacedSource = tuple[Place, Callable[[Search], StartingPoint | None]]
"""Place of a source, and the source: it returns a state, or None."""

SOURCES: tuple[PlacedSource, ...] = (
    (Place.CHECKPOINT, from_checkpoint),
    (Place.ANOTHER_RUN, from_branch),
    (Place.ANOTHER_RUN, from_initial),
    (Place.NEW, from_seed),
)
"""Sources of every run, in the order in which they are asked; the last always has a state."""


def read_skipped(directory: RunDirectory) -> SkippedRows:
    """Return the rows that a run has skipped; every process must call this.

    Args:
        directory: Run directory; the first process reads it.

    Raises:
        ValueError: The file is damaged.
    """

    def read() -> SkippedRows:
        windows = directory.read_skipped()
        with name_file(directory.skipped_file):
            return SkippedRows.from_json(windows)

    failure = f"{directory.skipped_file} is damaged, as the first process saw"
    skipped = on_first(read, failure) or SkippedRows()
    windows = share(np.asarray(skipped.windows, np.int32).ravel(), jax.process_index() == 0)
    return SkippedRows.from_json(windows.reshape(-1, 2).tolist())
