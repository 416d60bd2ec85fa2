# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Hook of the training loop that compares replicas."""

from __future__ import annotations

from jaxmoe.fingerprints import fingerprints
from jaxmoe.state_tree import without_external
from jaxmoe.training.state import TrainState


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
        fingerprints(without_external(state))
