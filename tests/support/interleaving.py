# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs sites one at a time in a random order that a seed decides, with time of its own.

Each call of a transport and each sleep is a point at which another site may go on, or this one is
killed. Sites that sleep wake in the order of their time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from jaxmoe.contrib.slow_links.sites.frames import Kind
from jaxmoe.contrib.slow_links.sites.transport import Closing, Collected, Transport


class KilledError(BaseException):
    """Ends a site at a point; no handler of the library catches it."""


class Task:
    """A site that runs when it is its turn."""

    def __init__(self, schedule: Schedule, work: Callable[[Task], Any]):
        self._schedule, self._work = schedule, work
        self._turn = threading.Semaphore(0)
        self.wakes = 0.0
        self.is_killed = self.has_ended = False
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def pause(self, seconds: float = 0.0) -> None:
        """Let others go on; return when it is this task's turn again."""
        self.wakes = self._schedule.time + seconds
        self._schedule.ready.release()
        self._turn.acquire()
        if self.is_killed:
            raise KilledError

    def step(self) -> None:
        """Run until the next point."""
        self._turn.release()
        assert self._schedule.ready.acquire(timeout=30)

    def now(self) -> float:
        return self._schedule.time

    def sleep(self, seconds: float) -> None:
        self.pause(seconds)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            self.result = self._work(self)
        except (KilledError, Exception) as error:
            self.result = error
        self.has_ended = True
        self._schedule.ready.release()


class Schedule:
    """Chooses which task goes on."""

    def __init__(self, seed: int):
        self.chance, self.time = random.Random(seed), 0.0
        self.ready = threading.Semaphore(0)
        self.tasks: list[Task] = []

    def start(self, work: Callable[[Task], Any]) -> Task:
        """Add a task."""
        self.tasks.append(Task(self, work))
        return self.tasks[-1]

    def run(self, on_step: Callable[[], None], most: int = 200_000) -> None:
        """Run all tasks to their ends.

        Args:
            on_step: Called before each step; may kill and start tasks.
            most: Steps after which they count as stuck.
        """
        for _ in range(most):
            on_step()
            alive = [task for task in self.tasks if not task.has_ended]
            if not alive:
                return
            runnable = [task for task in alive if task.wakes <= self.time]
            if not runnable:
                self.time = min(task.wakes for task in alive)
                continue
            self.chance.choice(runnable).step()
        raise AssertionError("sites are stuck")


class PausingTransport:
    """A transport with a point before and after each call."""

    def __init__(self, task: Task, inner: Transport):
        self._task, self._inner = task, inner

    def post(self, number: int, kind: Kind, payload: bytes) -> None:
        self._task.pause()
        self._inner.post(number, kind, payload)
        self._task.pause()

    def collect(self, number: int, kind: Kind) -> Collected:
        self._task.pause()
        found = self._inner.collect(number, kind)
        self._task.pause()
        return found

    def decide(self, number: int, kind: Kind, closing: Closing) -> Closing:
        self._task.pause()
        found = self._inner.decide(number, kind, closing)
        self._task.pause()
        return found

    def forget(self, number: int) -> None:
        self._inner.forget(number)

    def close(self) -> None:
        self._inner.close()
