# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Accounts for the wall time of a run over all its starts.

    goodput = seconds of training steps that count / (wall time - time after an intended end)

Each start appends to `goodput.jsonl` in the run directory: the seconds by kind (`Stopwatch`) and
the step at that time. One line per minute and one per checkpoint are kept; the last line is
overwritten at every report, so that a killed start loses at most the time since then. Rows of
`account`:

    train       steps that count: from dispatch to their metrics
    lost        training and data time of steps that a later start or a rollback repeated
    data        waiting for batches
    report evaluate checkpoint hooks    between steps; saving in the background is not counted
    resize      moving the state to another mesh
    start restore compile finish        before and after the steps; `restore` reads a checkpoint,
                                        initial values of a new run belong to `start`
    down        from the last record of a killed start to the next start
    preempted   the same after SIGTERM: time in the queue
    ended       the same after the end of the run or Ctrl-C: not wanted, and not counted

Every second is in one row. The time of a start before its first record is part of that record; a
start that fails earlier counts as `down`. The first process keeps the file. Cf. ml-goodput of
MaxText.

To add a row: `jaxmoe/resilience/goodput.py` and `jaxmoe/training/stopwatch.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmoe.disk import DiskGuard
from jaxmoe.json_bounds import read_lines
from jaxmoe.training import stopwatch as kinds
from jaxmoe.training.stopwatch import Stopwatch

ROWS: Mapping[str, str] = {
    kinds.DISPATCH: "train",
    kinds.WAIT: "train",
    kinds.LOOP: "train",
    **{kind: kind for kind in (kinds.DATA, kinds.REPORT, kinds.EVALUATE)},
    **{kind: kind for kind in (kinds.CHECKPOINT, kinds.HOOKS, kinds.START)},
    **{kind: kind for kind in (kinds.RESTORE, kinds.COMPILE, kinds.RESIZE, kinds.FINISH)},
}
"""Row of each kind of time."""
_BETWEEN = {"preempted": "preempted", "done": "ended", "interrupted": "ended"}
"""Row of the time after a start, by the status of that start; any other: down."""
_LINE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartRecord:
    """Seconds that one start had spent when it reached a step."""

    start: int
    """Number of the start, from 1."""
    began: float
    """Time of the start, in seconds since 1970."""
    first_step: int
    """Restored step."""
    step: int
    status: str
    """Status of the start: running, or how it ended."""
    seconds: Mapping[str, float]
    """Seconds by row."""


class Ledger:
    """Writes the records of one start; a full disk loses records and does not end the run.

    Args:
        path: File, new or of the resumed run.
        spent: Stopwatch of this process, running since the start began.
        first_step: Restored step.
    """

    def __init__(self, path: str | os.PathLike[str], spent: Stopwatch, *, first_step: int):
        self._path = pathlib.Path(path)
        self._spent = spent
        self._first_step = first_step
        self._guard = DiskGuard(path)
        self._began = time.time() - spent.total
        earlier = read_ledger(self._path)
        self._start = earlier[-1].start + 1 if earlier else 1
        self._at = self._path.stat().st_size if self._path.exists() else 0
        self._length = 0
        self._kept = -math.inf
        self._is_first = True
        self._step = first_step
        self.record(first_step)

    def record(self, step: int, *, status: str = "running", is_kept: bool = False) -> None:
        """Overwrite the last line, or begin a new one.

        Args:
            step: Steps done.
            status: "running", or how the start ended.
            is_kept: Whether the line stays, as for a step from which a later start may continue.
        """
        if step < self._step:  # rolled back: neither how far it had come nor this is written over
            self._at = self._at + self._length
            self._length = 0
            is_kept = True
        self._step = step
        seconds: dict[str, float] = {}
        for kind, value in self._spent.seconds.items():
            row = ROWS[kind]
            seconds[row] = seconds.get(row, 0.0) + value
        record = StartRecord(
            start=self._start,
            began=round(self._began, 3),
            first_step=self._first_step,
            step=step,
            status=status,
            seconds={row: round(value, 4) for row, value in seconds.items()},
        )
        with self._guard.warning_once():
            self._write(json.dumps(dataclasses.asdict(record)))
            total = self._spent.total
            if is_kept or total - self._kept >= _LINE_SECONDS:
                self._at = self._at + self._length
                self._length = 0
                self._kept = total

    def _write(self, text: str) -> None:
        # A line cut by the end of an earlier start stays alone on its line. In one system call, and
        # never shorter than what it replaces: a kill leaves one or the other.
        head = "\n" if self._is_first and self._at else ""
        line = (head + text.ljust(self._length - 1) + "\n").encode()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, line, self._at)
        finally:
            os.close(file)
        self._at, self._length, self._is_first = self._at + len(head), len(line) - len(head), False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Wall time of a run by row."""

    seconds: Mapping[str, float]
    """Seconds by row, largest first."""
    starts: int
    lost_steps: int

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first start to the last record."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of the steps that count in the time in which the run was meant to run."""
        wall = self.wall_seconds - self.seconds.get("ended", 0.0)
        return self.seconds.get("train", 0.0) / wall if wall else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the entries of `summary.json`."""
        return {
            "share": self.share,
            "wall_seconds": self.wall_seconds,
            "starts": self.starts,
            "lost_steps": self.lost_steps,
            "seconds": dict(self.seconds),
        }


def read_ledger(path: str | os.PathLike[str]) -> list[StartRecord]:
    """Return the records of a run in order; damaged lines are skipped.

    Args:
        path: File; may be missing.

    Raises:
        ValueError: It is no plain file.
    """
    path = pathlib.Path(path)
    lines = (fields for _, fields in read_lines(path)) if path.exists() else ()
    return [StartRecord(**fields) for fields in lines if _is_record(fields)]


def _is_record(fields: Mapping[str, Any]) -> bool:
    """Return whether fields have the names and types of a `StartRecord`."""
    seconds = fields.get("seconds")
    return (
        fields.keys() == {field.name for field in dataclasses.fields(StartRecord)}
        and all(type(fields[name]) is int for name in ("start", "first_step", "step"))
        and type(fields["began"]) in (int, float)
        and type(fields["status"]) is str
        and isinstance(seconds, dict)
        and all(type(value) in (int, float) for value in seconds.values())
    )


def account(records: Iterable[StartRecord]) -> Goodput:
    """Return the sums over all records of a run.

    Args:
        records: Records in order, from `read_ledger`.
    """
    starts: dict[int, list[StartRecord]] = {}
    for record in records:
        starts.setdefault(record.start, []).append(record)
    totals: dict[str, float] = {}

    def add(row: str, value: float) -> None:
        totals[row] = totals.get(row, 0.0) + value

    before: StartRecord | None = None
    for start in starts.values():
        last = start[-1]
        if before is not None:
            gap = last.began - (before.began + sum(before.seconds.values()))
            add(_BETWEEN.get(before.status, "down"), max(0.0, gap))
        for row, value in last.seconds.items():
            add(row, value)
        before = last
    lost, steps = _lost(list(starts.values()))
    for row, value in lost.items():
        add(row, -value)
        add("lost", value)
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return Goodput(
        seconds={row: value for row, value in ordered if value > 0.0},
        starts=len(starts),
        lost_steps=round(steps),
    )


def _lost(starts: list[list[StartRecord]]) -> tuple[dict[str, float], float]:
    """Return seconds by row, and steps, of the training that was repeated later.

    Goes through the records backwards with the lowest step from which anything later continued;
    between two records, steps are taken to last equally long.
    """
    lost = {"train": 0.0, kinds.DATA: 0.0}
    steps = 0.0
    continued = math.inf
    for later in reversed(starts):
        first = dataclasses.replace(later[0], step=later[0].first_step, seconds={})
        for start, following in reversed(list(zip([first, *later], later, strict=False))):
            if (
                following.step < start.step
            ):  # rolled back: what came after `one` is done again as well
                continued = min(continued, following.step)
                part = 1.0
            elif following.step <= continued:
                continue
            else:
                done = following.step - start.step
                above = following.step - max(start.step, continued)
                part = above / done if done else 1.0
                steps += above if done else 0.0
            for row in lost:
                lost[row] += part * (following.seconds.get(row, 0.0) - start.seconds.get(row, 0.0))
        continued = min(continued, later[0].first_step)
    return lost, steps


def format_goodput(goodput: Mapping[str, Any]) -> str:
    """Return one line: the share, and the rows above one percent.

    Args:
        goodput: Result of `Goodput.to_json`.
    """
    wall = max(goodput["wall_seconds"], 1e-9)
    rows = [f"{row} {value / wall:.0%}" for row, value in goodput["seconds"].items()]
    shown = [
        text
        for text, value in zip(rows, goodput["seconds"].values(), strict=True)
        if value / wall >= 0.01
    ]
    starts = f"{goodput['starts']} start" + "s" * (goodput["starts"] != 1)
    lost = f", {goodput['lost_steps']} steps lost" if goodput["lost_steps"] else ""
    return (
        f"goodput {goodput['share']:.1%} (training steps that count) of"
        f" {goodput['wall_seconds']:.1f} s in {starts}{lost}:"
        f" {', '.join(shown)}"
    )
