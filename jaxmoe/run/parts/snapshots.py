# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Snapshots`: the state of a run in the memory of its hosts.

The supervisor (`experiments/launch/supervise.py`) names the directory of a process's snapshots in
$JAXMOE_SNAPSHOTS and deletes it at the end.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence

import jax
import numpy as np

from jaxmoe.configs import fingerprint, to_json
from jaxmoe.resilience.hooks import SnapshotHook
from jaxmoe.resilience.shared_memory import SNAPSHOTS
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import FREE_FIELDS, PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.monitoring import Watches
from jaxmoe.run.parts.base import RunPart
from jaxmoe.training.hooks import Hook
from jaxmoe.training.stopwatch import CHECKPOINT
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


class Snapshots(RunPart):
    """Keeps snapshots every few steps, from which processes restarted by a supervisor continue.

    Args:
        store: Snapshots of this process.
    """

    def __init__(self, store: SnapshotStore):
        self._store = store

    def hooks(self, assembly: Assembly, watches: Watches) -> Sequence[Hook]:
        """Return the hook that keeps snapshots, with the metrics of their steps on disk."""
        config = assembly.plan.config
        hook = SnapshotHook(
            self._store,
            config=to_json(dataclasses.replace(config, model=assembly.plan.model)),
            position=assembly.loader.position,
            every=config.checkpoint.snapshot_every,
            last_step=config.training.steps,
            before=watches.reporter.flush,
        )
        return (watches.timed(hook, CHECKPOINT),)

    def ended(self, step: int, status: str) -> None:
        """Wait for the snapshot that is written."""
        del step, status
        self._store.finish()

    def go_back(self) -> None:
        """Delete the snapshots."""
        self._store.keep_only(None)

    def close(self) -> None:
        """Wait for the snapshot that is written."""
        self._store.finish()


def _decisive(config: PretrainConfig) -> str:
    """Return the fingerprint of the fields that may not change within a run."""
    free = {field: getattr(PretrainConfig(), field) for field in FREE_FIELDS if "." not in field}
    return fingerprint(dataclasses.replace(config, **free))
