# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs the sides of a comparison, each in a process of its own, so that thread pools stay apart.

A side reads one JSON line with what it is given, prints one with its facts, and answers each
further line with one JSON line: the seconds of a step, its result, the seconds that processors have
worked for it, and the peak of the process's resident memory, bytes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from experiments.bench.measure import Timing, in_turns
from experiments.cli.process import keep_freed_memory


class Side(Protocol):
    """One library in a comparison."""

    facts: dict[str, Any]
    """What is known before the first step."""

    def step(self, number: int) -> tuple[float, Any]:
        """Return the seconds of one step, and its result.

        Args:
            number: Number of the step, from 0.
        """
        ...


class SideProcess:
    """A side that runs in a process.

    Args:
        module: Module that answers requests, as by `answer_requests`.
        settings: Settings of the side.
        python: Interpreter; this one when None.
        needs: What to do where the side does not start, for the message.
        name: Name of the side in the message; the module when None.

    Raises:
        ValueError: It does not start.
    """

    def __init__(
        self,
        module: str,
        settings: dict[str, Any],
        *,
        python: str | None,
        needs: str,
        name: str | None = None,
    ):
        self._name = name or module
        self._needs = needs
        self._complaints = tempfile.TemporaryFile("w+")  # an unread pipe would fill up
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self.facts: dict[str, Any] = self.ask(json.dumps(settings))
        self.results: list[Any] = []
        self.cpu_seconds: list[float] = []
        self.peak_bytes = 0

    def step(self) -> float:
        """Return the seconds of one step; its result is added to `results`."""
        seconds, result, cpu_seconds, self.peak_bytes = self.ask("step")
        self.results.append(result)
        self.cpu_seconds.append(cpu_seconds)
        return seconds

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.communicate()
        self._complaints.close()

    def ask(self, line: str) -> Any:
        """Return the answer to a line.

        Raises:
            ValueError: The process has ended.
        """
        stdin = self._process.stdin
        stdout = self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as the empty answer tells
            stdin.write(line + "\n")
            stdin.flush()
        answer = stdout.readline()
        if not answer:
            self._process.wait()
            self._complaints.seek(0)
            last = self._complaints.read().strip().splitlines()[-1:]
            self.close()
            raise ValueError(
                f"{self._name} did not run: {' '.join(last) or 'it ended'}. {self._needs}"
            )
        return json.loads(answer)


def sides_in_turns(
    modules: Mapping[str, str],
    settings: dict[str, Any],
    *,
    peer: str,
    python: str | None,
    rounds: int,
    warm_up: int,
    share: float = float("inf"),
) -> tuple[dict[str, SideProcess], dict[str, Timing]]:
    """Run all sides, which take turns, and return them, ended, with their times.

    Args:
        modules: Module of each side.
        settings: What all of them are given.
        peer: Side of another library, which the extra hf brings.
        python: Interpreter of the peer; this one when None.
        rounds: Counted steps of each side.
        warm_up: Steps before them.
        share: Seconds of one side, see `in_turns`.

    Raises:
        ValueError: A side does not start.
    """
    sides: dict[str, SideProcess] = {}
    try:
        for name, module in modules.items():
            needs = f"{peer} needs the extra hf (Python 3.11): name its interpreter with"
            sides[name] = SideProcess(
                module,
                settings,
                python=python if name == peer else None,
                needs=f"{needs} --peer_python",
            )
        steps = {name: side.step for name, side in sides.items()}
        return sides, in_turns(steps, rounds=rounds, warm_up=warm_up, share=share)
    finally:
        for side in sides.values():
            side.close()


def peak_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def answer_requests(side_class: Callable[[dict[str, Any]], Side]) -> None:
    """Answer requests until the input ends.

    Args:
        side_class: Class of the side, called with what the first line holds.
    """
    keep_freed_memory()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not an answer
    side = side_class(json.loads(sys.stdin.readline()))
    print(json.dumps({**side.facts, "loaded_bytes": peak_bytes()}), file=answers, flush=True)
    for number, _ in enumerate(sys.stdin):
        begin = time.process_time()
        step = side.step(number)
        cpu_seconds = time.process_time() - begin
        print(json.dumps([*step, cpu_seconds, peak_bytes()]), file=answers, flush=True)
