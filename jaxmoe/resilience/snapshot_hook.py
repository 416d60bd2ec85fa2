# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A snapshot of the state in the hosts' memory every so many steps: `checkpoint/snapshot.py`.

Not at the end: there is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxmoe.resilience.snapshot import SnapshotStore
from jaxmoe.training.state import TrainState


class SnapshotHook:
    """A hook of the loop.

    Args:
        store: where to.
        config: the run's config as JSON.
        position: data position after so many steps.
        every: steps; 0: never.
        last_step: of the run.
        before: called before each snapshot (to flush what belongs to its steps).
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
        """Every so many steps, before the last."""
        return self._every > 0 and step % self._every == 0 and step < self._last_step

    def run(self, step: int, state: TrainState) -> None:
        """Copies the state; it is written while the next steps run."""
        self._before()
        self._store.save(step, state, config=self._config, data=self._position(step))
