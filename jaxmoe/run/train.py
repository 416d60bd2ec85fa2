# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains a run from its restored state to its last files, yielding after every optimiser step.

    prepare    compare processes, assemble, lease the directory, restore
    compile    the train step, for each batch size that is still to come; an island joins the others
    train      steps with evaluation, checkpoints and rollbacks
    finish     last checkpoint, samples, pictures, report, summary

The generators here are driven by `Run`. Sending a true value into one stops it after the step just
yielded: the state is saved, and the run can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from typing import cast

import jax

from jaxmoe.checkpoint import CheckpointManager, LeaseLostError
from jaxmoe.errors import EndRunError, configuration_errors
from jaxmoe.fingerprints import ReplicasDifferError
from jaxmoe.islands.config import IslandConfig
from jaxmoe.messages import say
from jaxmoe.planning.attached import memory_warning
from jaxmoe.resilience.agreement import check_agreement
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import assemble
from jaxmoe.run.compile import CompiledStep, compile_steps
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.elastic.request import Resized
from jaxmoe.run.elastic.resizing import Resizing, record_devices
from jaxmoe.run.elastic.shrink import fitted
from jaxmoe.run.load import check_trains
from jaxmoe.run.loop import Steps, has_state, save_last
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.provenance.adapted import base_of
from jaxmoe.run.provenance.kept_partition import keep_partition
from jaxmoe.run.provenance.kept_tokenizer import keep_tokenizer
from jaxmoe.run.provenance.lineage import check_config, record_source
from jaxmoe.run.provenance.saved_config import config_check
from jaxmoe.run.recovery import averaged_events, averaged_steps, record_averaged, with_raised_rate
from jaxmoe.run.replicas.islands import Island
from jaxmoe.run.reporter import Reporter, check_packages
from jaxmoe.run.reporting.advice import divergence_advice
from jaxmoe.run.reporting.finish import finish_run
from jaxmoe.run.reporting.header import nothing_to_do, print_header
from jaxmoe.run.restore import Begun, Lineage, open_snapshots, read_skipped
from jaxmoe.run.results import TrainResult
from jaxmoe.run.rollback import Trained, train_with_rollback
from jaxmoe.run.serving.rollouts import check_rollouts
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.loop import Status
from jaxmoe.training.stopwatch import CHECKPOINT, COMPILE, FINISH, RESTORE, START
from sharding.coordination import barrier

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A leased run directory with the state to continue from."""

    begun: Begun
    checkpoints: CheckpointManager
    snapshots: SnapshotStore | None
    island: Island | None
    """Rounds with the other islands; None for a job that has all workers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ended:
    """End of the steps, for the last files."""

    trained: Trained
    watches: Watches
    resizes: tuple[Resized, ...]
    """Changes of the mesh."""
    compile_seconds: float
    started: float
    """Reading of `time.perf_counter` when the run was prepared."""
    checkpoint_step: int | None
    is_saved: bool


def train_steps(
    name: str,
    config: PretrainConfig,
    directory: RunDirectory,
    supervision: Supervision,
    *,
    extends: bool | frozenset[str] = False,
) -> Steps[TrainResult]:
    """Train a run, new or interrupted, to its last step.

    Args:
        name: Name of the run, for messages and trackers.
        config: Configuration of this start.
        directory: Run directory.
        supervision: Watchdog, signals and resources of this process.
        extends: Whether a run in the directory may go on with changed `EXTENSION_FIELDS`; or the
            fields that the command line names, which may differ from those of the checkpoint too.

    Yields:
        Each step, once it is dispatched and its hooks have run.

    Returns:
        How the run ended.

    Raises:
        ConfigurationError: The configuration, the directory or the data cannot be used.
    """
    try:
        with configuration_errors():
            prepared = prepare(config, directory, supervision, extends=extends)
    except LeaseLostError:
        return _taken_over(directory, 0)
    begun = prepared.begun
    if begun.step >= config.training.steps:
        say(nothing_to_do(directory, begun.step, config))
        return TrainResult(
            status="done",
            step=begun.step,
            checkpoint_step=begun.step,
            summary=directory.summary() or {},
        )
    print_header(name, directory, begun.assembly, begun.step)
    if begun.origin is not None:
        say(f"restored {begun.origin}")
    ended = yield from _train_prepared(name, directory, prepared, supervision)
    if isinstance(ended, TrainResult):
        return ended
    return _finish(name, directory, begun, ended, supervision)


def prepare(
    config: PretrainConfig,
    directory: RunDirectory,
    supervision: Supervision,
    *,
    extends: bool | frozenset[str] = False,
) -> Prepared:
    """Check the configuration, lease the directory and restore the newest state.

    Args:
        config: Configuration of this start.
        directory: Run directory; leased until `supervision.resources` closes.
        supervision: Watchdog, signals and resources of this process.
        extends: See `train_steps`.

    Raises:
        ValueError: The configuration, the directory or the data cannot be used.
        LeaseLostError: Another process took the directory meanwhile.
    """
    resources, watchdog = supervision.resources, supervision.watchdog
    check_packages(config.tracking)
    check_agreement(config, config.processes.barrier)
    check_trains(directory, config)
    config, devices = fitted(config)
    assembly = assemble(config, trains=True, devices=devices)
    check_rollouts(assembly)
    is_first, record = jax.process_index() == 0, None
    if is_first:
        step_plan = assembly.plan.step_plan(assembly.execution)
        if text := memory_warning(step_plan, jax.local_devices()):
            logger.warning("%s", text)
        directory.acquire(
            steal=config.run.steal_lock,
            heartbeat=config.run.lock_heartbeat,
            on_lost=supervision.stop.taken_over,
        )
        resources.callback(directory.release)
        record = check_config(directory, config, assembly.plan, extends=extends is not False)
    assembly = assembly.with_files(directory.path)
    if assembly.files is not None:
        resources.callback(assembly.files.close)
    checkpoints = CheckpointManager(
        directory.checkpoints_directory,
        keep=config.checkpoint.keep,
        verify=config.checkpoint.verify,
        kept=assembly.plan.kept_steps,
        fence=directory.fence if is_first else None,
        base=base_of(assembly),
    )
    resources.callback(checkpoints.close)
    watchdog.beat("restoring")
    barrier("before restoring", config.processes.barrier)
    if (snapshots := open_snapshots(assembly, directory)) is not None:
        resources.callback(snapshots.finish)
    own = dataclasses.replace(assembly.plan.config, model=assembly.plan.model)
    agrees = config_check(directory, own, extends)
    lineage = Lineage(assembly.loader, read_skipped(directory), agrees)
    # Initial values of a new run belong to its start.
    restores = checkpoints.latest_step() is not None or snapshots is not None
    kind = RESTORE if restores or config.checkpoint.initial is not None else START
    assembly = with_raised_rate(assembly, averaged_steps(directory))
    with supervision.stopwatch.on(kind):
        begun = lineage.restore_or_start(assembly, checkpoints, snapshots=snapshots)
    island = None
    if assembly.island is not None and begun.step < config.training.steps:
        island = _island(assembly.island, begun, supervision)
        resources.callback(island.close)
    if record is not None:
        record()
        if begun.averaged is not None:
            record_averaged(directory, begun.averaged)
        if begun.source is not None:
            record_source(directory, begun.source, config)
        keep_tokenizer(directory, config, assembly.source)
        keep_partition(directory, assembly.source)
        record_devices(directory, assembly)
    return Prepared(begun=begun, checkpoints=checkpoints, snapshots=snapshots, island=island)


def _island(config: IslandConfig, begun: Begun, supervision: Supervision) -> Island:
    """Return the rounds of an island, which it has not joined yet."""
    training = begun.assembly.worker_training
    assert training is not None  # checked by `assemble`
    with jax.set_mesh(begun.assembly.mesh):
        return Island(config, training, begun.state, lambda: supervision.stop.reason)


def _compile(begun: Begun, supervision: Supervision) -> tuple[CompiledStep, float]:
    """Return the compiled training step, and the seconds that it took."""
    supervision.watchdog.beat("compiling")
    say("compiling the training step ...")
    compiling = time.perf_counter()
    with supervision.stopwatch.on(COMPILE):
        compiled = compile_steps(begun.assembly, begun.step, begun.state)
    seconds = time.perf_counter() - compiling
    say(f"compiled in {seconds:.1f} s")
    return compiled, seconds


def _join(
    island: Island, begun: Begun, supervision: Supervision
) -> tuple[Begun, CompiledStep, float]:
    """Return what the islands begin with, the compiled step with its exchanges, and its seconds.

    All is compiled before: the others do not wait long for an island that has joined.
    """
    compiled, seconds = _compile(begun, supervision)
    island.compile(begun.state)
    supervision.watchdog.beat("waiting for the other islands")
    step, state = island.start(begun.step, begun.state)
    if state is not begun.state:
        jax.tree.map(lambda leaf: leaf.delete(), begun.state)  # others hold a reference
    return dataclasses.replace(begun, step=step, state=state), island.around(compiled), seconds


def _train_prepared(
    name: str, directory: RunDirectory, prepared: Prepared, supervision: Supervision
) -> Steps[_Ended | TrainResult]:
    """Compile, train and save the last state; a `TrainResult` if the run was taken over."""
    started = time.perf_counter()
    begun, checkpoints = prepared.begun, prepared.checkpoints
    watchdog, stopwatch = supervision.watchdog, supervision.stopwatch
    joined = None
    if prepared.island is not None:
        try:
            with jax.set_mesh(begun.assembly.mesh):
                joined = _join(prepared.island, begun, supervision)
        except LeaseLostError:
            return _taken_over(directory, begun.step)
        except EndRunError as error:
            return TrainResult(
                status=cast(Status, error.status),
                step=begun.step,
                checkpoint_step=checkpoints.latest_step(),
                message=str(error),
            )
        begun = joined[0]
    with configuration_errors(), directory.usable():
        reporter = Reporter(name, directory, begun.assembly, begun.step)
        watches = Watches(directory, begun.assembly, reporter, stopwatch, begun.step, watchdog)
    resizing = Resizing(supervision.stop, directory, reporter.watched)
    with contextlib.closing(reporter), contextlib.closing(resizing):
        if joined is None:
            compiled, compile_seconds = _compile(begun, supervision)
        else:
            _, compiled, compile_seconds = joined
        watchdog.beat("waiting for the first step")
        barrier("before the first step", begun.assembly.plan.config.processes.first)
        try:
            trained = yield from train_with_rollback(
                directory,
                begun,
                checkpoints,
                prepared.snapshots,
                compiled,
                resizing,
                watches,
            )
        except LeaseLostError:  # raised during a rollback
            return _taken_over(directory, begun.step, reporter)
        result = trained.result
        if result.status == "taken_over":
            return _taken_over(directory, result.step, reporter)
        if result.status == "done":
            resizing.finish(result.step)
        watchdog.beat("the last save", result.step)
    if result.status in ("preempted", "interrupted") and has_state(result):
        say(f"{result.status}: saving step {result.step} (a second signal ends at once)")
    try:
        with stopwatch.on(CHECKPOINT), jax.set_mesh(trained.assembly.mesh):
            is_saved = save_last(result, trained.saving, checkpoints)
    except LeaseLostError:
        return _taken_over(directory, result.step, reporter)
    except ReplicasDifferError as error:
        logger.error("step %d: %s", result.step, error)
        result = dataclasses.replace(result, status="corrupted")
        trained, is_saved = dataclasses.replace(trained, result=result), False
    return _Ended(
        trained=trained,
        watches=watches,
        resizes=tuple(resizing.done),
        compile_seconds=compile_seconds,
        started=started,
        checkpoint_step=checkpoints.latest_step(),
        is_saved=is_saved,
    )


def _finish(
    name: str, directory: RunDirectory, begun: Begun, ended: _Ended, supervision: Supervision
) -> TrainResult:
    """Write the last files; outside of the mesh, because samples are generated on one device."""
    result, trace, watches = ended.trained.result, ended.trained.trace, ended.watches
    watches.note(result.step, result.status)
    facts = {
        "status": result.status,
        "steps": result.step,
        "compile_seconds": ended.compile_seconds,
        "wall_seconds": time.perf_counter() - ended.started,
        "checkpoint_step": ended.checkpoint_step,
        "restored_from": begun.origin,
        "profile": str(trace.directory) if trace is not None and trace.is_written else None,
        "goodput": watches.goodput(),
        "warnings": watches.warnings,
        "averaged": averaged_events(directory),
        "optimizer_files": None if begun.assembly.files is None else begun.assembly.files.facts(),
        "resizes": [dataclasses.asdict(event) for event in ended.resizes],
    }
    supervision.watchdog.beat("writing the report")
    with supervision.stopwatch.on(FINISH):
        summary = finish_run(
            name, directory, ended.trained.assembly, watches.reporter, result, facts
        )
    watches.note(result.step, result.status)
    status, message = result.status, ""
    if status == "diverged" and result.refused is not None:
        config = begun.assembly.plan.config
        message = divergence_advice(directory, config, result.refused, ended.checkpoint_step)
    if status not in ("diverged", "corrupted") and not ended.is_saved:
        status = "not_saved"
        message = (
            "the last state could not be saved; the run can continue from step"
            f" {ended.checkpoint_step}"
        )
    return TrainResult(
        status=status,
        step=result.step,
        checkpoint_step=ended.checkpoint_step,
        message=message,
        summary=summary,
    )


def _taken_over(
    directory: RunDirectory, step: int, reporter: Reporter | None = None
) -> TrainResult:
    """End without touching the files, which another process writes by now."""
    if reporter is not None:
        reporter.abandon()
    try:
        directory.fence()
        reason = f"run.directory={directory.path} was held by another process for a while"
    except (LeaseLostError, OSError) as error:
        reason = str(error)
    return TrainResult(status="taken_over", step=step, checkpoint_step=None, message=reason)
