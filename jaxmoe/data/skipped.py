# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records the rows that a run has skipped, so that its batches stay a function of the step.

    first row of step t  =  rows of all steps before t  +  rows skipped before t

A window is skipped once, before the step that it names. Windows are counted in rows, because batch
sizes may grow (`batch_sizes`). Each checkpoint holds the windows before its own step in its data
position; a file of the run holds all of them, because a run may resume from a checkpoint older than
a window. `resume` reconciles the two.

`jaxmoe/run/rollback.py` decides which rows are skipped.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxmoe.data.batch import DataError

_MOST = (1 << 31) - 1
"""Largest step, and number of rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedRows:
    """Windows of rows, and the steps before which they are skipped."""

    windows: tuple[tuple[int, int], ...] = ()
    """(step, rows) of each window, ordered by step."""

    def __post_init__(self):
        if any(step < 0 or rows < 1 for step, rows in self.windows):
            raise DataError(
                f"skipped={list(self.windows)}: each window needs step >= 0 and rows >= 1"
            )
        if list(self.windows) != sorted(self.windows):
            raise DataError(f"skipped={list(self.windows)} must be in the order of the steps")

    def rows_before(self, step: int) -> int:
        """Return the rows skipped before the batch of a step."""
        return sum(rows for first, rows in self.windows if first <= step)

    def before(self, step: int) -> SkippedRows:
        """Return the windows before a step."""
        return SkippedRows(tuple(window for window in self.windows if window[0] < step))

    def with_window(self, step: int, rows: int) -> SkippedRows:
        """Return these windows and another one."""
        return _of([*self.windows, (step, rows)])

    def resume(self, saved: SkippedRows, step: int) -> SkippedRows | None:
        """Return the windows of a run that resumes from a checkpoint.

        Args:
            saved: Windows in the checkpoint; all are before its step.
            step: Step of the checkpoint.

        Returns:
            These windows (of the run's file) and those that only the checkpoint holds, if the file
            was lost. None if the checkpoint has read rows that the run has skipped since, and is
            therefore abandoned.
        """
        counts = collections.Counter(self.before(step).windows)
        saved_counts = collections.Counter(saved.windows)
        if counts - saved_counts:
            return None
        return _of([*self.windows, *(saved_counts - counts).elements()])

    def to_json(self) -> list[list[int]]:
        """Return the windows as JSON values."""
        return [list(window) for window in self.windows]

    @classmethod
    def from_json(cls, data: Any) -> SkippedRows:
        """Return the windows of `to_json`.

        Raises:
            DataError: The data is not a list of [step, rows], or a number is too large.
        """
        is_list = isinstance(data, list) and all(
            isinstance(window, list)
            and len(window) == 2
            and all(type(number) is int and abs(number) <= _MOST for number in window)
            for window in data
        )
        if not is_list:
            raise DataError(f"skipped={data!r} must be a list of [step, rows], below 2**31")
        return cls(tuple((step, rows) for step, rows in data))


def _of(windows: Iterable[tuple[int, int]]) -> SkippedRows:
    return SkippedRows(tuple(sorted(windows)))
