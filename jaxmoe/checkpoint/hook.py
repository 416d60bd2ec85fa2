# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Saves the state of a training loop at regular steps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxmoe.checkpoint.commit import SavesFailedError
from jaxmoe.checkpoint.manager import CheckpointManager
from jaxmoe.training.hooks import is_every
from jaxmoe.training.state import TrainState
from sharding.distributed import agree


class CheckpointHook:
    """Saves every `every` steps, at the steps `also`, at the last step, and after a failed save.

    Saves before the last step are lazy. The caller of a loop that was stopped early calls `save` to
    save the last state.

    Args:
        manager: Manager of the run's checkpoints.
        config: Config of the run as JSON.
        position: Function from a number of steps to the data position after them.
        every: Steps between saves.
        also: Further steps to save.
        last_step: Last step of the run.
        before: Function called before each save (to flush the records of the saved steps).
        agree_every: Steps between exchanges of failures between processes.
        max_failed: Consecutive failed saves that end the run.
        is_lazy: Whether a save lets training go on before the state is on the host.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        also: Collection[int] = (),
        last_step: int,
        before: Callable[[], None],
        agree_every: int = 1,
        max_failed: int = 5,
        is_lazy: bool = True,
    ):
        self._manager = manager
        self._config = config
        self._position = position
        self._every = every
        self._last_step = last_step
        self._before = before
        self._also = also
        self._agree_every = agree_every
        self._max_failed = max_failed
        self._is_lazy = is_lazy
        self.saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether to save at a step.

        One process repeats a failed save at the next step, several at the next `agree_every`.
        """
        if is_every(step, self._every, self._last_step) or step in self._also:
            return True
        if jax.process_count() > 1 and step % self._agree_every:
            return False
        return bool(agree(int(self._manager.is_owed())))

    def run(self, step: int, state: TrainState) -> None:
        """Start a save; the manager logs a failure and the run goes on.

        Raises: see `save`.
        """
        self.save(step, state, is_lazy=self._is_lazy and step < self._last_step)

    def save(self, step: int, state: Any, *, is_lazy: bool = False) -> None:
        """Start a save whether or not it is due.

        Args:
            step: Number of the step.
            state: State after it.
            is_lazy: Whether to return before the state is on the host.

        Raises:
            SavesFailedError: Too many consecutive saves have failed.
            LeaseLostError: Another process has taken the directory over.
            ReplicasDifferError: Devices hold other bits than their replicas.
        """
        if (failed := agree(self._manager.failures)) >= self._max_failed:
            raise SavesFailedError(
                f"{failed} saves in a row have failed (checkpoint.safety.max_failed_saves="
                f"{self._max_failed}), the last reason is above: free space or mend the disk, then"
                " repeat the command"
            )
        self._before()
        position = self._position(step)
        if self._manager.save(step, state, config=self._config, data=position, is_lazy=is_lazy):
            self.saved_step = step
