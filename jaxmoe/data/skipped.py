# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of the endless sequence that a run has jumped, so that its data stay a function of the step.

    first row of step t  =  rows of all steps before t  +  rows jumped before t

A window is jumped once, before the step that it names; it is counted in rows and not in batches,
because batches may grow (`batch_sizes`). Two records say what was jumped: each checkpoint, as part
of its data position, the windows before its own step; and a file of the run all of them, because a
restart may begin at a checkpoint older than the window. `continued` says how they agree.

It does not decide what is jumped: see `jaxmoe/run/rollback.py`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxmoe.data.batch import DataError


@dataclasses.dataclass(frozen=True, slots=True)
class SkippedRows:
    """Windows of rows, by the step before which they are jumped."""

    windows: tuple[tuple[int, int], ...] = ()
    """(step, rows), by step."""

    def __post_init__(self):
        if any(step < 0 or rows < 1 for step, rows in self.windows):
            raise DataError(
                f"skipped={list(self.windows)}: each window is a step from 0 on, and 1 row or more"
            )
        if list(self.windows) != sorted(self.windows):
            raise DataError(f"skipped={list(self.windows)} must be in the order of the steps")

    def rows_before(self, step: int) -> int:
        """Rows jumped before the batch of a step is read."""
        return sum(rows for first, rows in self.windows if first <= step)

    def before(self, step: int) -> SkippedRows:
        """The windows among what was read until so many steps were done."""
        return SkippedRows(tuple(window for window in self.windows if window[0] < step))

    def with_window(self, step: int, rows: int) -> SkippedRows:
        """One window more."""
        return _of([*self.windows, (step, rows)])

    def continued(self, saved: SkippedRows, step: int) -> SkippedRows | None:
        """What a run has jumped that goes on from a checkpoint.

        Args:
            saved: windows that the checkpoint knows; all are before its step.
            step: of the checkpoint.

        Returns:
            These windows, which the run's file holds, and those that only the checkpoint knows,
            where the file was lost. None: the checkpoint has read rows that the run has jumped
            since, and belongs to what the run has left behind.
        """
        here = collections.Counter(self.before(step).windows)
        there = collections.Counter(saved.windows)
        if here - there:
            return None
        return _of([*self.windows, *(there - here).elements()])

    def to_json(self) -> list[list[int]]:
        """Values that JSON holds."""
        return [list(window) for window in self.windows]

    @classmethod
    def from_json(cls, data: Any) -> SkippedRows:
        """The inverse of `to_json`.

        Raises:
            DataError: it is something else.
        """
        is_list = isinstance(data, list) and all(
            isinstance(window, list)
            and len(window) == 2
            and all(type(number) is int for number in window)
            for window in data
        )
        if not is_list:
            raise DataError(f"skipped={data!r} must be a list of [step, rows]")
        return cls(tuple((step, rows) for step, rows in data))


def _of(windows: Iterable[tuple[int, int]]) -> SkippedRows:
    return SkippedRows(tuple(sorted(windows)))
