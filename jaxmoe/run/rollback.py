# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rolls a run back to a checkpoint when too many steps in a row were refused.

    refused   steps b-k+1 .. b, each of which changed nothing (k = training.max_skipped)
    dumped    their batches, to bad_data/ (`experiments.replay` analyses them)
    restored  the newest valid checkpoint that has read none of them, or the initial state
    skipped   their rows, once: step b-k+1 reads what step b+1 would have read

The steps between are trained again, on the same data. The window does not depend on how often
metrics are reported. The skipped rows are recorded twice (see `jaxmoe.data.skipped`): first in
`skipped.json`, and then in the data position of every later checkpoint, so that a restart at any
moment, from any checkpoint, continues as the run would have. A checkpoint of an abandoned step is
set aside.

After `training.rollbacks` windows the run ends as diverged. Every process decides from the same
metrics and records; the first one writes. Learning rate, clipping and the order of the data after
the window do not change.

A resize (`jaxmoe/run/elastic`) also ends the loop: the next one has another mesh.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Generator
from typing import Any

import jax

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.hook import CheckpointHook
from jaxmoe.data import Loader
from jaxmoe.errors import configuration_errors
from jaxmoe.messages import say
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep, compile_steps
from jaxmoe.run.diagnostics.refused_batches import dump_batches
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.elastic.resizing import Moved, Resizing
from jaxmoe.run.hooks import make_saving, make_trace
from jaxmoe.run.loop import in_mesh, run_steps
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.recovery import record_averaged
from jaxmoe.run.restore import Begun, Lineage, make_snapshots
from jaxmoe.run.results import TrainedStep
from jaxmoe.training.hooks import Trace
from jaxmoe.training.loop import LoopResult
from jaxmoe.training.stopwatch import COMPILE, RESIZE, RESTORE
from sharding.coordination import barrier
from sharding.distributed import agree

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """End of the steps, with the objects last used."""

    assembly: Assembly
    result: LoopResult
    saving: CheckpointHook
    trace: Trace | None


def train_with_rollback(
    directory: RunDirectory,
    begun: Begun,
    checkpoints: CheckpointManager,
    snapshots: SnapshotStore | None,
    compiled: CompiledStep,
    resizing: Resizing,
    watches: Watches,
) -> Generator[TrainedStep, bool | None, Trained]:
    """Train; go on on another mesh, or after too many refused steps in a row from an earlier step.

    Args:
        directory: Run directory.
        begun: State to begin from; donated.
        checkpoints: Checkpoint manager of the run.
        snapshots: Snapshots of this process; deleted at a rollback. None without any.
        compiled: Train step from `compile_steps`.
        resizing: Request to save and stop, or to go on on another mesh.
        watches: Comparisons of this start, whose reporter is left open.

    Yields:
        Each step, as `run_steps` does.

    Returns:
        The end of the last loop.

    Raises:
        LeaseLostError: Another process holds the run directory by now.
        ConfigurationError: No earlier state can be restored.
    """
    reporter, spent = watches.reporter, watches.spent
    assembly, first_step, state = begun.assembly, begun.step, begun.state
    config, compiled_from, trace = assembly.plan.config, first_step, None
    while True:
        saving = make_saving(assembly, checkpoints, reporter)
        if trace is None or not trace.is_written:
            trace = make_trace(directory, config, first_step)
        kept = make_snapshots(assembly, snapshots, reporter)
        resizing.begin(assembly, first_step, state)
        steps = run_steps(
            assembly, compiled, first_step, state, saving, trace, resizing, watches, kept
        )
        result = yield from in_mesh(assembly.mesh, steps)
        if snapshots is not None:
            snapshots.finish()
        if result.status == "resized":
            leaves, first_step = jax.tree.leaves(result.state), result.step
            del state, result, steps  # so that the devices hold one state only
            moved = _moved(resizing, leaves, first_step, watches)
            assembly, compiled, state = moved.assembly, moved.compiled, moved.state
            compiled_from = first_step
            del moved
            continue
        ended = Trained(assembly=assembly, result=result, saving=saving, trace=trace)
        if result.refused is None or assembly.learner is not None:  # answers would be the same
            return ended
        checkpoints.check_held()  # the next lines write
        dump_batches(directory, assembly.loader, result.refused)
        if len(assembly.loader.skipped.windows) >= config.training.rollbacks:
            return ended
        if assembly.island is not None:  # the others do not go back
            return ended
        lineage = _jump(directory, assembly.loader, result.refused)
        if lineage is None:
            return ended
        refused, target = result.refused, jax.tree.map(_shape_of, result.state)
        del state, result, ended  # so that the device holds one state only
        checkpoints.finish()
        if snapshots is not None:
            snapshots.keep_only(None)
        again = _restored(lineage, assembly, checkpoints, target, directory, watches)
        assembly, first_step, state = again.assembly, again.step, again.state
        if first_step < compiled_from:
            watches.watchdog.beat("compiling")
            with spent.on(COMPILE):
                compiled = compile_steps(assembly, first_step, state)
            compiled_from = first_step
            barrier("before the steps that follow", assembly.plan.config.processes.first)
        reporter.go_back(first_step)
        say(_rollback_message(directory, assembly, refused, first_step))


def _moved(resizing: Resizing, leaves: list[Any], step: int, watches: Watches) -> Moved:
    """Return the run on its new mesh, which the watches follow."""
    watches.watchdog.beat("resizing", step)
    with watches.spent.on(RESIZE):
        moved = resizing.move(leaves, step)
    watches.on_mesh(moved.assembly)
    return moved


def _restored(
    lineage: Lineage,
    assembly: Assembly,
    checkpoints: CheckpointManager,
    target: Any,
    directory: RunDirectory,
    watches: Watches,
) -> Begun:
    """Return the newest state of a lineage after a rollback."""
    watches.watchdog.beat("restoring")
    with configuration_errors(), watches.spent.on(RESTORE):
        begun = lineage.restore_or_start(assembly, checkpoints, target=target)
    if begun.averaged is not None and jax.process_index() == 0:
        record_averaged(directory, begun.averaged)
    return begun


def _jump(directory: RunDirectory, loader: Loader, refused: tuple[int, int]) -> Lineage | None:
    """Record skipped rows and return the lineage without them; None if they cannot be recorded."""
    first, last = refused
    loader = loader.without_steps(first - 1, last - 1)  # step n reads batch n - 1
    problem = None
    if jax.process_index() == 0:
        try:
            directory.write_skipped(loader.skipped.to_json())
        except ValueError as error:
            problem = error
    if agree(problem is not None):
        logger.warning("the run cannot go back: %s", problem or "the first process says why")
        return None
    return Lineage(loader, loader.skipped)


def _shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _rollback_message(
    directory: RunDirectory, assembly: Assembly, refused: tuple[int, int], step: int
) -> str:
    """Return the message about a rollback."""
    windows = assembly.loader.skipped.windows
    first, last = refused
    back = f"the checkpoint of step {step}" if step else "the initial state"
    return (
        f"rolled back to {back}: steps {first} to {last} were refused, and their data are skipped"
        f" before step {first} (rollback {len(windows)} of at most"
        f" {assembly.plan.config.training.rollbacks}); look into it with python -m"
        f" experiments.replay --run.directory {directory.path} --step {first}"
    )
