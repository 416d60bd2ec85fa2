# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares a run: compares processes, assembles, leases the directory, restores its state."""

from __future__ import annotations

import dataclasses
import logging

import jax

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.planning.attached import memory_warning
from jaxmoe.resilience.agreement import check_agreement
from jaxmoe.run.assemble import assemble
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.elastic.resizing import record_devices
from jaxmoe.run.elastic.shrink import fitted
from jaxmoe.run.load import check_trains
from jaxmoe.run.parts.base import RunPart
from jaxmoe.run.parts.members import make_parts
from jaxmoe.run.parts.snapshots import open_snapshots
from jaxmoe.run.provenance.adapted import base_of
from jaxmoe.run.provenance.kept_partition import keep_partition
from jaxmoe.run.provenance.kept_tokenizer import keep_tokenizer
from jaxmoe.run.provenance.lineage import check_config, record_source
from jaxmoe.run.provenance.saved_config import config_check
from jaxmoe.run.recovery import averaged_steps, with_raised_rate
from jaxmoe.run.reporter import check_packages
from jaxmoe.run.restore import Begun, Lineage, read_skipped
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.stopwatch import RESTORE, START
from sharding.coordination import barrier

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A leased run directory with the state to continue from."""

    begun: Begun
    checkpoints: CheckpointManager
    parts: tuple[RunPart, ...]
    """What the run does beside its steps."""


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
        extends: See `Trainer`.

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
    assembly.feed.check()
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
    snapshots = open_snapshots(assembly, directory)
    own = dataclasses.replace(assembly.plan.config, model=assembly.plan.model)
    agrees = config_check(directory, own, extends)
    lineage = Lineage(assembly.loader, read_skipped(directory), agrees)
    # Initial values of a new run belong to its start.
    restores = checkpoints.latest_step() is not None or snapshots is not None
    kind = RESTORE if restores or config.checkpoint.initial is not None else START
    assembly = with_raised_rate(assembly, averaged_steps(directory))
    with supervision.stopwatch.on(kind):
        begun = lineage.restore_or_start(assembly, checkpoints, snapshots=snapshots)
    parts = make_parts(begun, directory, supervision, snapshots)
    if record is not None:
        record()
        if begun.source is not None:
            record_source(directory, begun.source, config)
        keep_tokenizer(directory, config, assembly.source)
        keep_partition(directory, assembly.source)
        record_devices(directory, assembly)
    for part in parts:
        part.restored(begun)
    return Prepared(begun=begun, checkpoints=checkpoints, parts=parts)
