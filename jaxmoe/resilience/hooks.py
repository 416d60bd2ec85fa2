# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of the training loop: snapshots in the memory of the hosts, comparisons of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmoe.fingerprints import fingerprints
from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.training.optimizer_files.array import on_devices
from jaxmoe.training.state import TrainState


class SnapshotHook:
    """Saves a snapshot every few steps, except after the last, when a checkpoint is saved.

    Args:
        store: Snapshots of this process.
        config: Config of the run as JSON.
        position: Data position after a number of steps.
        every: Steps between snapshots; 0 disables them.
        last_step: Last step of the run.
        before: Called before each snapshot, to flush what belongs to its steps.
    """

    def __init__(
        self,
        store: SnapshotStore,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        last_step: int,
        before: Callable[[], None],
    ):
        self._store, self._config, self._position = store, config, position
        self._every, self._last_step, self._before = every, last_step, before

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every` and not the last."""
        return self._every > 0 and step % self._every == 0 and step < self._last_step

    def run(self, step: int, state: TrainState) -> None:
        """Copy the state; writing continues in the background."""
        self._before()
        self._store.save(step, state, config=self._config, data=self._position(step))


class ReplicaHook:
    """Compares the replicas of all arrays every few steps.

    Args:
        every: Steps between comparisons; 0 disables them.
    """

    def __init__(self, every: int):
        self._every = every

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every`."""
        return self._every > 0 and step % self._every == 0

    def run(self, step: int, state: TrainState) -> None:
        """Raise ReplicasDifferError, naming devices and arrays, if replicas differ."""
        fingerprints(on_devices(state))
