# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names stragglers: processes for which all others wait.

The duration of a step is the same on all processes, because they meet in its collectives. What
differs is the time that each spends on the host before it dispatches a step (data, hooks, reports,
other Python), and the time that the others wait. The former is compared, window by window, with one
small gather at a step where all processes report:

    centre  lower median over processes: the smaller one of two, so that the rule holds for 2
    spread  1.4826 x lower median of |time - centre|: 0 for two processes, where the floors decide
    excess  time - centre
    outlier excess > max(z x spread, absolute floor, relative floor x time of a step), and
            excess > its own waiting: a process that waits longer than it is late delays no other

A process is named when it has been an outlier in `windows` windows in a row, or in
`windows_if_large` if the excess is a large share of the step; once, until it has recovered.

A slow device or link is not found: the host of a slow device waits as long as the others, and the
time of a device before its first collective is visible only in a profile (`--profile.steps`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxmoe.training import stopwatch as kinds
from jaxmoe.training.state import TrainState
from jaxmoe.training.stopwatch import Stopwatch
from sharding.distributed import gather

BEFORE = (
    kinds.DATA,
    kinds.HOOKS,
    kinds.EVALUATE,
    kinds.CHECKPOINT,
    kinds.REPORT,
    kinds.LOOP,
)
"""Kinds of time before the collective."""
WAITING = (kinds.DISPATCH, kinds.WAIT)

_WORDS = {
    kinds.DATA: "waiting for data",
    kinds.HOOKS: "hooks",
    kinds.EVALUATE: "evaluation",
    kinds.CHECKPOINT: "checkpoints",
    kinds.REPORT: "reporting",
    kinds.LOOP: "other work of the host",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRule:
    """Thresholds above which a process is a straggler."""

    z: float = 6.0
    """Spreads above the centre."""
    absolute: float = 0.005
    """Seconds per step above the centre."""
    relative: float = 0.1
    """Share of a step above the centre."""
    windows: int = 3
    """Number of windows in a row."""
    large: float = 0.5
    """Share of a step above the centre that counts as a large margin."""
    windows_if_large: int = 2
    """Number of windows in a row with a large margin."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """Process that is late."""

    process: int
    excess: float
    """Seconds per step above the centre."""
    step_seconds: float
    """Seconds of a step of the run."""
    kind: str
    """Kind of time with most of the excess."""

    def __str__(self) -> str:
        return (
            f"process {self.process} is late: {1e3 * self.excess:.1f} ms before each step more than"
            f" the others, which wait for it ({self.excess / self.step_seconds:.0%} of the step);"
            f" most of it in {_WORDS[self.kind]}"
        )


def lower_median(values: np.ndarray) -> Any:
    """Return the lower median over the first axis."""
    return np.sort(values, axis=0)[(len(values) - 1) // 2]


def outliers(
    before: Float[np.ndarray, "P K"], waited: Float[np.ndarray, " P"], rule: StragglerRule
) -> tuple[Float[np.ndarray, " P"], float]:
    """Return the seconds per step by which each process is late; 0 for all that are not.

    Args:
        before: seconds per step before the collective, by process and kind.
        waited: seconds per step that each process waited.
        rule: what counts as late.

    Returns:
        The excess, and the seconds of a step.
    """
    totals = before.sum(axis=1)
    step_seconds = float(lower_median(totals + waited))
    center = lower_median(totals)
    spread = 1.4826 * lower_median(np.abs(totals - center))
    excess = totals - center
    floor = max(rule.z * spread, rule.absolute, rule.relative * step_seconds)
    return np.where((excess > floor) & (excess > waited), excess, 0.0), step_seconds


class StragglerWatch:
    """Judges consecutive windows of all processes; every process reaches the same verdicts.

    Args:
        rule: what counts as late.
    """

    def __init__(self, rule: StragglerRule | None = None):
        self._rule = rule or StragglerRule()
        self._in_a_row = np.zeros(0, np.int64)
        self._large_in_a_row = np.zeros(0, np.int64)
        self._is_named: Bool[np.ndarray, " P"] = np.zeros(0, bool)

    def window(
        self, before: Float[np.ndarray, "P K"], waited: Float[np.ndarray, " P"]
    ) -> list[Straggler]:
        """Return the processes that are late in this window and have not been named yet.

        Args:
            before: seconds per step before the collective, by process and kind of `BEFORE`.
            waited: seconds per step that each process waited.
        """
        rule = self._rule
        processes = len(before)
        if len(self._in_a_row) != processes:
            self._in_a_row = np.zeros(processes, np.int64)
            self._large_in_a_row = np.zeros(processes, np.int64)
            self._is_named = np.zeros(processes, bool)
        excess, step_seconds = outliers(before, waited, rule)
        is_late = excess > 0.0
        self._in_a_row = np.where(is_late, self._in_a_row + 1, 0)
        is_large = excess > rule.large * step_seconds
        self._large_in_a_row = np.where(is_large, self._large_in_a_row + 1, 0)
        is_found = (self._in_a_row >= rule.windows) | (
            self._large_in_a_row >= rule.windows_if_large
        )
        places = np.flatnonzero(is_found & ~self._is_named)
        self._is_named = is_found | (self._is_named & is_late)
        more = before - lower_median(before)
        return [
            Straggler(
                process=int(process),
                excess=float(excess[process]),
                step_seconds=step_seconds,
                kind=BEFORE[int(more[process].argmax())],
            )
            for process in places
        ]


class StragglerHook:
    """Compares the processes every few steps; every process must have it.

    Args:
        spent: Stopwatch of this process.
        every: Steps of a window.
        report: Called with the step and each straggler.
        rule: Thresholds.
    """

    def __init__(
        self,
        spent: Stopwatch,
        *,
        every: int,
        report: Callable[[int, Straggler], None],
        rule: StragglerRule | None = None,
    ):
        self._spent = spent
        self._every = every
        self._report = report
        self._watch = StragglerWatch(rule)
        self._before = spent.seconds
        self._steps = 0

    def is_due(self, step: int) -> bool:
        """Return whether `step` is a multiple of `every`."""
        self._steps += 1
        return step % self._every == 0

    def run(self, step: int, state: TrainState | None) -> None:
        """Gather the times of the window and report stragglers."""
        now = self._spent.seconds
        with self._spent.on(kinds.WAIT):
            gathered = gather(np.asarray([*self._of(now, BEFORE), *self._of(now, WAITING)]))
        self._before = self._spent.seconds
        self._steps = 0
        before = gathered[:, : len(BEFORE)]
        waited = gathered[:, len(BEFORE) :].sum(axis=1)
        for straggler in self._watch.window(before.astype(float), waited.astype(float)):
            self._report(step, straggler)

    def _of(self, now: dict[str, float], kinds: Sequence[str]) -> list[np.float32]:
        steps = max(1, self._steps)
        return [
            np.float32((now.get(kind, 0.0) - self._before.get(kind, 0.0)) / steps) for kind in kinds
        ]
