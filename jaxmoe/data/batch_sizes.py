# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the number of rows of each step, where it changes during a run.

A pure function of the step, so that the number of rows before a step is known without reading them:
no row is read twice or skipped when a run resumes.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSizes:
    """Batch sizes, each from a given step on."""

    stages: tuple[tuple[int, int], ...]
    """(first step, rows) of each stage, in order; the first is at step 0."""

    def __post_init__(self):
        firsts = [first for first, _ in self.stages]
        if not firsts or firsts[0] != 0 or sorted(set(firsts)) != firsts:
            raise ValueError(
                f"stages={self.stages} must begin at step 0, each stage after the one before"
            )
        if min(rows for _, rows in self.stages) < 1:
            raise ValueError(f"stages={self.stages}: every batch needs at least one row")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each stage, in order."""
        return tuple(rows for _, rows in self.stages)

    def rows(self, step: int) -> int:
        """Return the rows of one step."""
        return next(rows for first, rows in reversed(self.stages) if first <= max(step, 0))

    def rows_before(self, step: int) -> int:
        """Return the rows of all steps before a step."""
        ends = [first for first, _ in self.stages[1:]] + [step]
        return sum(
            rows * max(0, min(end, step) - first)
            for (first, rows), end in zip(self.stages, ends, strict=True)
        )
