# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Integrates the power of simulated instances over time."""

from __future__ import annotations


class PowerMeter:
    """Energy of everything that is on."""

    def __init__(self) -> None:
        self.joules = 0.0
        """Energy until the last change."""
        self._watts = 0.0
        self._time = 0.0

    def change(self, now: float, watts: float) -> None:
        """Add power from now on, or take it away.

        Args:
            now: Seconds on the simulated clock.
            watts: Change.
        """
        self.joules += self._watts * (now - self._time)
        self._time = now
        self._watts += watts
