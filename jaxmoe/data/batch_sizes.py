# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of each step, where they are not the same at every step.

A pure function of the step, so that the rows read before a step are known without reading them: no
row is read twice or skipped, wherever a run is resumed.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSizes:
    """A few sizes, each from some step on."""

    stages: tuple[tuple[int, int], ...]
    """(first step, rows), in order; the first at step 0."""

    def __post_init__(self):
        firsts = [first for first, _ in self.stages]
        if not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise ValueError(
                f"stages={self.stages} must begin at step 0, each after the one before"
            )
        if min(rows for _, rows in self.stages) < 1:
            raise ValueError(f"stages={self.stages}: every batch needs at least one row")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, smallest first where batches grow."""
        return tuple(rows for _, rows in self.stages)

    def rows(self, step: int) -> int:
        """Rows of one step."""
        return next(rows for first, rows in reversed(self.stages) if first <= max(step, 0))

    def rows_before(self, step: int) -> int:
        """Rows of all steps before this one."""
        ends = [first for first, _ in self.stages[1:]] + [step]
        return sum(
            rows * max(0, min(end, step) - first)
            for (first, rows), end in zip(self.stages, ends, strict=True)
        )
