# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs parts in processes: those that compile together first, then each alone, in a time budget.

Each process has its rows and its log in files of the directory, a limit in seconds, and its own
session, so that a part that hangs, and what it has started, ends at its limit. What it has written
until then counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.bench.accelerator.work import Phase

_LINES_OF_LOG = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchPart:
    """One part of the benchmark."""

    name: str
    """Name on the command line."""
    module: str
    """Module that runs it: it ends in `run_part`."""
    line: str
    """What it shows."""
    seconds: float = 60.0
    """Limit of its measurement, alone."""
    compile_seconds: float = 0.0
    """Limit of its first run beside the others; 0 where it has none."""
    is_measured: bool = True
    """Whether it runs alone too."""
    fraction: float = 0.9
    """Share of the device's memory that JAX takes when it runs alone."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of its module."""

    def limit(self, phase: Phase) -> float:
        """Return the limit of a phase, seconds."""
        return self.compile_seconds if phase == "compile" else self.seconds

    def with_limits(self, factor: float) -> BenchPart:
        """Return the part with other limits.

        Args:
            factor: Multiple of the limits of both phases.
        """
        return dataclasses.replace(
            self, seconds=factor * self.seconds, compile_seconds=factor * self.compile_seconds
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class PartOutcome:
    """What became of a part in one phase."""

    part: str
    phase: Phase
    seconds: float
    rows: list[dict[str, Any]]
    error: str | None = None
    """Why it did not end well, with the end of its log."""


class PartProcess:
    """A part that runs in a process of its own.

    Args:
        part: Part to start.
        phase: Phase of it.
        directory: Directory of rows and logs.
        is_tiny: Whether sizes are those of a test.
        limit: Seconds after which it is stopped.
    """

    def __init__(
        self, part: BenchPart, phase: Phase, directory: pathlib.Path, *, is_tiny: bool, limit: float
    ):
        self.part = part
        self._limit = limit
        self.phase: Phase = phase
        places = directory / "parts"
        places.mkdir(parents=True, exist_ok=True)
        self._rows, self._log = (places / f"{part.name}.{phase}.{end}" for end in ("jsonl", "log"))
        options = dict(part.options) | {"place": str(places / part.name)}
        request = json.dumps({"phase": phase, "is_tiny": is_tiny, "options": options})
        self._started = time.monotonic()
        with self._rows.open("wb") as rows, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", part.module, request],
                env=self._environment(directory),
                stdin=subprocess.DEVNULL,
                stdout=rows,
                stderr=log,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """Return whether it still runs; ends it at its limit."""
        if self._process.poll() is not None:
            return False
        if self.seconds > self._limit:
            self.stop()
            return False
        return True

    def stop(self) -> None:
        """End the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def outcome(self) -> PartOutcome:
        """Return its rows, and why it failed where it did; called once it has ended."""
        seconds = self.seconds
        code = self._process.returncode
        error = None
        if code == -signal.SIGKILL and seconds >= self._limit:
            error = f"stopped after {self._limit:.0f} s"
        elif code:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            error = "\n".join([f"ended with code {code}", *lines[-_LINES_OF_LOG:]])
        return PartOutcome(
            part=self.part.name,
            phase=self.phase,
            seconds=round(seconds, 1),
            rows=list(_rows_in(self._rows)),
            error=error,
        )

    def _environment(self, directory: pathlib.Path) -> dict[str, str]:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(directory.absolute() / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.phase == "compile":
            environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        else:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(self.part.fraction)
        return environment


def run_together(
    parts: Sequence[BenchPart],
    directory: pathlib.Path,
    *,
    is_tiny: bool,
    workers: int,
    until: float,
) -> Iterator[PartOutcome]:
    """Run the first phase of parts beside one another, and yield what became of each.

    Args:
        parts: Parts, in the order of their start.
        directory: Directory of rows, logs and the cache.
        is_tiny: Whether sizes are those of a test.
        workers: Processes at a time.
        until: Time of the monotonic clock at which all are stopped.
    """
    waiting = [part for part in parts if part.compile_seconds]
    running = list[PartProcess]()
    try:
        while waiting or running:
            while waiting and len(running) < workers and time.monotonic() < until:
                part = waiting.pop(0)
                limit = min(part.compile_seconds, until - time.monotonic())
                running.append(
                    PartProcess(part, "compile", directory, is_tiny=is_tiny, limit=limit)
                )
            if not running:
                break
            for process in [process_ for process_ in running if not process_.is_running()]:
                running.remove(process)
                yield process.outcome()
            time.sleep(0.1)
        for part in waiting:
            yield PartOutcome(
                part=part.name, phase="compile", seconds=0.0, rows=[], error="left out: no time"
            )
    finally:
        for process in running:
            process.stop()


def run_alone(
    parts: Sequence[BenchPart], directory: pathlib.Path, *, is_tiny: bool, until: float
) -> Iterator[PartOutcome]:
    """Run the measurement of parts one after the other, and yield what became of each.

    Args:
        parts: Parts, most worth first.
        directory: Directory of rows, logs and the cache.
        is_tiny: Whether sizes are those of a test.
        until: Time of the monotonic clock at which the last is stopped.
    """
    for part in parts:
        if not part.is_measured:
            continue
        seconds_left = until - time.monotonic()
        if seconds_left < 2.0:
            yield PartOutcome(
                part=part.name, phase="measure", seconds=0.0, rows=[], error="left out: no time"
            )
            continue
        limit = min(part.seconds, seconds_left)
        process = PartProcess(part, "measure", directory, is_tiny=is_tiny, limit=limit)
        try:
            while process.is_running():
                time.sleep(0.1)
        finally:
            process.stop()
        yield process.outcome()


def _rows_in(path: pathlib.Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):  # a row that was cut off
            yield json.loads(line)
