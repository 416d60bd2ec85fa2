# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Going back: what a run does when too many steps in a row were refused.

    refused   steps b-k+1 .. b, each of which changed nothing (k = training.max_skipped)
    dumped    their batches, to bad_data/ (`experiments.replay` looks into them)
    restored  the newest whole checkpoint that has read none of them, or the initial state
    jumped    their rows, once: step b-k+1 reads what step b+1 would have read

The steps between are trained again, on the data that they had. The window does not depend on how
often metrics are reported. Two records hold what was jumped (see `jaxmoe.data.skipped`):
`skipped.json`, which is written first of all, and the data position of every checkpoint after that;
so that a restart at any moment, from any checkpoint, continues as the run itself would have. A
checkpoint of a step that was since left behind is set aside.

After `training.rollbacks` windows the run ends as diverged. Every process decides from the same
metrics and the same records; the first one writes.

It does not change the learning rate, the clip or the order of the data after the window.
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
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.compile import CompiledStep, compile_steps
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.hooks import make_saving, make_trace
from jaxmoe.run.loop import run_steps
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.refused_batches import dump_batches
from jaxmoe.run.restore import Begun, Lineage, make_snapshots
from jaxmoe.run.results import TrainedStep
from jaxmoe.training.hooks import Trace
from jaxmoe.training.loop import LoopResult
from jaxmoe.training.stopwatch import COMPILE, RESTORE
from sharding.coordination import barrier
from sharding.distributed import agree

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended, with what it last used."""

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
    stop: StopRequest,
    watches: Watches,
) -> Generator[TrainedStep, bool | None, Trained]:
    """Train, and after too many refused steps in a row once more from an earlier step.

    Args:
        directory: of the run.
        begun: where the run begins; its state is donated.
        checkpoints: of the run.
        snapshots: of this process, or None; those of a past that is left are deleted.
        compiled: from `compile_steps`.
        stop: asked after every step.
        watches: of this start; their reporter is left open.

    Raises:
        LeaseLostError: another process has the run's directory by now.
    """
    reporter, spent = watches.reporter, watches.spent
    assembly, first_step, state = begun.assembly, begun.step, begun.state
    config, compiled_from, trace = assembly.plan.config, first_step, None
    while True:
        saving = make_saving(assembly, checkpoints, reporter)
        if trace is None or not trace.is_written:
            trace = make_trace(directory, config, first_step)
        kept = make_snapshots(assembly, snapshots, reporter)
        result = yield from run_steps(
            assembly, reporter, compiled, first_step, state, saving, trace, stop, watches, kept
        )
        if snapshots is not None:
            snapshots.finish()
        ended = Trained(assembly=assembly, result=result, saving=saving, trace=trace)
        if result.refused is None:
            return ended
        checkpoints.check_held()  # what follows writes
        dump_batches(directory, assembly.loader, result.refused)
        if len(assembly.loader.skipped.windows) >= config.training.rollbacks:
            return ended
        lineage = _jump(directory, assembly.loader, result.refused)
        if lineage is None:
            return ended
        refused, target = result.refused, jax.tree.map(_shape_of, result.state)
        del state, result, ended  # the device need not hold two states
        checkpoints.finish()
        if snapshots is not None:
            snapshots.keep_only(None)
        # As at the start, where none of them is whole.
        watches.watchdog.beat("restoring")
        with configuration_errors(), spent.on(RESTORE):
            again = lineage.restore_or_start(assembly, checkpoints, target=target)
        assembly, first_step, state = again.assembly, again.step, again.state
        if first_step < compiled_from:
            watches.watchdog.beat("compiling")
            with spent.on(COMPILE):
                compiled = compile_steps(assembly, first_step, state)
            compiled_from = first_step
            barrier("before the steps that follow", assembly.plan.config.processes.first)
        reporter.go_back(first_step)
        say(_in_words(directory, assembly, refused, first_step))


def _jump(directory: RunDirectory, loader: Loader, refused: tuple[int, int]) -> Lineage | None:
    """The lineage that jumps some steps' rows, on record; None where it cannot be recorded."""
    first, last = refused
    loader = loader.without_steps(first - 1, last - 1)  # a step reads the batch before its number
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


def _in_words(
    directory: RunDirectory, assembly: Assembly, refused: tuple[int, int], step: int
) -> str:
    windows = assembly.loader.skipped.windows
    first, last = refused
    back = f"the checkpoint of step {step}" if step else "the initial state"
    return (
        f"rolled back to {back}: steps {first} to {last} were refused, and what they read is jumped"
        f" before step {first} (rollback {len(windows)} of at most"
        f" {assembly.plan.config.training.rollbacks}); look into it with python -m"
        f" experiments.replay --run.directory {directory.path} --step {first}"
    )
