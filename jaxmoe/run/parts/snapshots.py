# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a run in the memory of its hosts.

The supervisor (`experiments/launch/supervise.py`) names the directory of a process's snapshots in
$JAXMOE_SNAPSHOTS and deletes it at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import os

import jax
import numpy as np

from jaxmoe.configs import fingerprint, to_json
from jaxmoe.resilience.hooks import SnapshotHook
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.reporter import Reporter
from sharding.distributed import gather

logger = logging.getLogger(__name__)


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
