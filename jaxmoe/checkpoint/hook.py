# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`CheckpointHook`: saves the state of a training loop every few steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmoe.checkpoint.commit import SavesFailedError
from jaxmoe.checkpoint.manager import CheckpointManager
from jaxmoe.training.hooks import is_every
from jaxmoe.training.state import TrainState
from sharding.distributed import agree


class CheckpointHook:
    """Saves every so many steps and at the end, and at the next step after a save that failed.

    A loop that was stopped leaves its last state to whoever runs it, who calls this once more.

    Args:
        manager: where to.
        config: the run's config as JSON.
        position: data position after so many steps.
        every: steps.
        last_step: of the run.
        before: called before each save (to flush what belongs to the steps saved).
        agree_every: steps after which several processes ask one another whether a save failed.
        max_failed: saves in a row that fail before the run ends.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        *,
        config: dict[str, Any],
        position: Callable[[int], dict[str, Any]],
        every: int,
        last_step: int,
        before: Callable[[], None],
        agree_every: int = 1,
        max_failed: int = 5,
    ):
        self._manager, self._config, self._position = manager, config, position
        self._every, self._last_step, self._before = every, last_step, before
        self._agree_every, self._max_failed = agree_every, max_failed
        self.saved_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Every so many steps, at the end, and when the last save has failed.

        One process sees a failure at the next step; several ask one another every `agree_every`.
        """
        if is_every(step, self._every, self._last_step):
            return True
        if jax.process_count() > 1 and step % self._agree_every:
            return False
        return bool(agree(int(self._manager.is_owed())))

    def run(self, step: int, state: TrainState) -> None:
        """Starts a save; a failed one is reported by the manager and the run goes on.

        Raises:
            SavesFailedError: so many have failed in a row.
            LeaseLostError: another process writes to the directory by now.
        """
        if (failed := agree(self._manager.failures)) >= self._max_failed:
            raise SavesFailedError(
                f"{failed} saves in a row have failed (checkpoint.max_failed_saves="
                f"{self._max_failed}), the last reason is above: free space or mend the disk, then"
                " give the same command again"
            )
        self._before()
        position = self._position(step)
        if self._manager.save(step, state, config=self._config, data=position):
            self.saved_step = step
