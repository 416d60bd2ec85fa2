# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Prepares a run: compares processes, assembles, leases the directory, restores its state."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import jax

from jaxmoe.checkpoint import CheckpointManager
from jaxmoe.checkpoint.huggingface.hub import is_huggingface
from jaxmoe.data import Source
from jaxmoe.messages import TEXT_FILES
from jaxmoe.planning.attached import memory_warning
from jaxmoe.resilience.agreement import check_agreement
from jaxmoe.run.assemble import Assembly, Setting, assemble, describe_devices
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart, make_parts
from jaxmoe.run.provenance.lineage import check_config, config_check, record_source
from jaxmoe.run.provenance.tokens import keep_tokens
from jaxmoe.run.provenance.warm_start import base_of
from jaxmoe.run.reporter import check_packages
from jaxmoe.run.restore import Continuation, Place, StartingPoint, read_skipped
from jaxmoe.run.supervision import Supervision
from jaxmoe.training.stopwatch import RESTORE, START
from sharding.coordination import barrier

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A leased run directory with the state to continue from."""

    start: StartingPoint
    checkpoints: CheckpointManager
    parts: list[RunPart]
    """What the run does beside its steps."""


def prepare(
    config: PretrainConfig,
    directory: RunDirectory,
    supervision: Supervision,
    *,
    extends: bool | frozenset[str] = False,
    source: Source | None = None,
) -> Prepared:
    """Check the configuration, lease the directory and restore the newest state.

    Args:
        config: Configuration of this start.
        directory: Run directory; leased until `supervision.resources` closes.
        supervision: Watchdog, signals and resources of this process.
        extends: See `Trainer`.
        source: Data that were read already; None reads them.

    Raises:
        ValueError: The configuration, the directory or the data cannot be used.
        LeaseLostError: Another process took the directory meanwhile.
    """
    resources = supervision.resources
    watchdog = supervision.watchdog
    check_packages(config.tracking)
    if jax.process_count() > 1:
        check_agreement(config, config.timeouts.barrier)
    check_trains(directory, config)
    parts = make_parts(config, directory, supervision)
    setting = Setting(config=config, devices=jax.devices())
    for part in parts:
        setting = part.fit(setting)
    config = setting.config
    assembly = assemble(
        config, trains=True, source=source, devices=setting.devices, job=setting.job
    )
    assembly.feed.check()
    is_first = jax.process_index() == 0
    record = None
    if is_first:
        _hold(directory, assembly, supervision)
        record = check_config(directory, config, assembly.plan, extends=extends is not False)
    checkpoints = CheckpointManager(
        directory.checkpoints_directory,
        keep=config.checkpoint.keep,
        verify=config.checkpoint.safeguards.verify,
        pinned_steps=assembly.plan.kept_steps,
        fence=directory.fence if is_first else None,
        base=None if assembly.plan.model.adapter is None else base_of(assembly),
    )
    resources.callback(checkpoints.close)
    watchdog.beat("restoring")
    barrier("before restoring", config.timeouts.barrier)
    for part in parts:
        assembly = part.prepare(assembly)
    sources = [source for part in parts for source in part.sources()]
    config_of_run = dataclasses.replace(assembly.plan.config, model=assembly.plan.model)
    agrees = config_check(directory, config_of_run, extends)
    continuation = Continuation(assembly.loader, read_skipped(directory), agrees)
    # Initial values of a new run belong to its start.
    keeps = any(place is Place.NEWER for place, _ in sources)
    restores = checkpoints.latest_step() is not None or keeps
    kind = RESTORE if restores or config.checkpoint.initial is not None else START
    with supervision.stopwatch.on(kind):
        start = continuation.restore_or_start(assembly, checkpoints, sources=sources)
    for part in parts:
        resources.callback(part.close)
    for part in parts:
        part.restore(start)
    if record is not None:
        record()
        if start.source is not None:
            record_source(directory, start.source, config)
        keep_tokens(directory, assembly.plan, assembly.source)
        record_devices(directory, assembly)
    for part in parts:
        part.record(start)
    return Prepared(start=start, checkpoints=checkpoints, parts=parts)


def _hold(directory: RunDirectory, assembly: Assembly, supervision: Supervision) -> None:
    """Lease the directory until the end of the run, and warn if the step will not fit."""
    lease = assembly.plan.config.run.lease
    step_plan = assembly.plan.step_plan(assembly.execution)
    if text := memory_warning(step_plan, jax.local_devices()):
        logger.warning("%s", text)
    directory.acquire(
        steal=lease.steal,
        heartbeat=lease.heartbeat,
        on_lost=supervision.stop.taken_over,
    )
    supervision.resources.callback(directory.release)


def record_devices(directory: RunDirectory, assembly: Assembly) -> None:
    """Write `environment.json`: what the run is on, and which devices of the job it leaves out.

    Args:
        directory: Held directory of the run.
        assembly: Plan, devices and data of the run.
    """
    mesh_devices = list(assembly.mesh.devices.flat)
    directory.write_environment(
        describe_devices(mesh_devices),
        assembly.execution.precision.compute_dtype.name,
        mesh=assembly.execution.mesh.by_axis,
        spare_devices=describe_devices(
            [device for device in jax.devices() if device not in mesh_devices]
        ),
    )


def check_trains(directory: RunDirectory, config: PretrainConfig) -> None:
    """Refuse to train a run that serves inference only.

    Args:
        directory: Run directory, new or not.
        config: Configuration of this start.

    Raises:
        ValueError: The directory holds imported or quantised weights, or the precision is one for
            inference.
    """
    has_adapter = config.model.adapter is not None
    config.execution.precision.check_trains(has_adapter=has_adapter)
    if not config.data.traits.has_rows:
        raise ValueError(
            f"data:{config.data.name} has no rows to train on: choose data, such as data:files"
            f" {TEXT_FILES}"
        )
    if not directory.has_config():
        return
    if is_huggingface(directory.path):
        raise ValueError(
            f"run.directory={directory.path} holds a Hugging Face model: choose another directory"
            " with --run.directory"
        )
    if (directory.summary() or {}).get("status") == "imported":
        raise ValueError(
            f"run.directory={directory.path} holds weights that were imported, without an"
            " optimiser's state: choose another directory with --run.directory"
        )
    weights: Any = directory.config_json()
    for name in ("execution", "precision", "weights"):
        weights = weights.get(name) if isinstance(weights, dict) else None
    if weights not in (None, "floating") and not has_adapter:
        raise ValueError(
            f"run.directory={directory.path} holds a run whose weights were rounded to {weights},"
            " for inference: train the one that it came from, or choose another directory with"
            " --run.directory"
        )
