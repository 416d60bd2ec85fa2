# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Schedules of gradient coding over several rounds, for workers that are slow in bursts.

Job t is the gradient of batch t, and must be known some rounds after round t, as it is where
several models, or several parts of a step, are trained in turn. Workers are slow in bursts: in any
`window` of W rounds at most `slow` (lambda) different workers are slow, and the slow rounds of one
lie within `burst` (B) rounds. A worker that is slow in a round returns nothing of it.

    SR-SGC    coded tasks with s = ceil(B lambda / (W - 1 + B)); what is missing of job t - B is
              done again in round t; delay B, load (s + 1) / n
    M-SGC     W - 1 tasks without code, then B coded ones or those that failed, one in a round;
              delay W - 2 + B, load (lambda + 1)(W - 1 + B) / (n (B + (W - 1)(lambda + 1)))

No command trains with them: workers of one program wait for each other, and sites exchange
parameters. They are for a driver that gives tasks to workers of its own.

The load is the share of a batch that a worker computes in a round. Source: sequential gradient
coding, ICLR 2023. A master would wait (1 + mu) times as long as for the fastest worker, and call
slow what has not answered by then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import NamedTuple


class CodedTask(NamedTuple):
    """Task of a worker."""

    job: int
    part: int
    """Number of the task in the job: SR-SGC has one; M-SGC has W - 1 without code, then B coded."""


@dataclasses.dataclass(kw_only=True)
class _CodeSchedule:
    """What has been returned so far."""

    workers: int
    window: int
    burst: int
    slow: int

    def __post_init__(self):
        if not 1 <= self.burst < self.window:
            raise ValueError(
                f"burst={self.burst} must be at least 1 and below window={self.window}"
            )
        if not 0 <= self.slow < self.workers:
            raise ValueError(f"slow={self.slow} must be 0 or more and below workers={self.workers}")
        self.round = 0
        self.done: set[tuple[int, CodedTask]] = set()

    def finish_round(self, tasks: dict[int, list[CodedTask]], slow: Collection[int]) -> None:
        """Note what the workers that are not slow return.

        Args:
            tasks: Tasks of each worker in the round.
            slow: Slow workers.
        """
        for worker, worker_tasks in tasks.items():
            if worker not in slow:
                self.done |= {(worker, task) for task in worker_tasks}
        self.round += 1

    def count(self, task: CodedTask) -> int:
        """Return the number of workers that have returned a task."""
        return sum((worker, task) in self.done for worker in range(self.workers))


@dataclasses.dataclass(kw_only=True)
class SelectiveReattempt(_CodeSchedule):
    """SR-SGC."""

    def __post_init__(self):
        _CodeSchedule.__post_init__(self)
        if (self.window - 1) % self.burst:
            raise ValueError(f"burst={self.burst} must divide window - 1 = {self.window - 1}")

    @property
    def absent(self) -> int:
        """Number of workers s without whose task a job can be decoded."""
        return -(-self.burst * self.slow // (self.window - 1 + self.burst))

    @property
    def delay(self) -> int:
        """Rounds after round t in which job t is known."""
        return self.burst

    @property
    def load(self) -> float:
        """Share of a batch that a worker computes in a round."""
        return (self.absent + 1) / self.workers

    def tasks(self) -> dict[int, list[CodedTask]]:
        """Return the tasks of each worker in this round."""
        now = CodedTask(self.round, 0)
        old = CodedTask(self.round - self.burst, 0)
        missing = self.workers - self.absent - self.count(old) if old.job >= 0 else 0
        tasks_of_worker = {}
        for worker in range(self.workers):
            is_again = missing > 0 and (worker, old) not in self.done
            missing -= is_again
            tasks_of_worker[worker] = [old if is_again else now]
        return tasks_of_worker

    def is_known(self, job: int) -> bool:
        """Return whether the gradient of a job can be decoded."""
        return self.count(CodedTask(job, 0)) >= self.workers - self.absent


@dataclasses.dataclass(kw_only=True)
class Multiplexed(_CodeSchedule):
    """M-SGC."""

    @property
    def delay(self) -> int:
        """Rounds after round t in which job t is known."""
        return self.window - 2 + self.burst

    @property
    def load(self) -> float:
        """Share of a batch that a worker computes in a round."""
        first, coded = self.task_sizes()
        assert abs((self.slow + 1) * coded - first) < 1e-12  # all tasks are equally large
        return (self.window - 1 + self.burst) * first

    def task_sizes(self) -> tuple[float, float]:
        """Return the shares of a batch in a task without code, and in a part of a coded task."""
        parts = self.burst + (self.window - 1) * (self.slow + 1)
        coded = 1.0 / (self.workers * parts)
        return (self.slow + 1) * coded, coded

    def tasks(self) -> dict[int, list[CodedTask]]:
        """Return the tasks of each worker in this round: one each of the last jobs."""
        tasks_of_worker: dict[int, list[CodedTask]] = {worker: [] for worker in range(self.workers)}
        for place in range(self.window - 1 + self.burst):
            job = self.round - place
            if job < 0:
                continue
            for worker, mine in tasks_of_worker.items():
                mine.append(self._task(worker, job, place))
        return tasks_of_worker

    def _task(self, worker: int, job: int, place: int) -> CodedTask:
        """Return the task of a worker in the round `place` rounds after the job's first."""
        if place < self.window - 1:
            return CodedTask(job, place)
        first = [CodedTask(job, part) for part in range(self.window - 1)]
        failed = [task for task in first if (worker, task) not in self.done]
        return failed[0] if failed else CodedTask(job, place)

    def is_known(self, job: int) -> bool:
        """Return whether the gradient of a job can be decoded."""
        parts = range(self.window - 1 + self.burst)
        counts = [self.count(CodedTask(job, part)) for part in parts]
        first = counts[: self.window - 1]
        coded = counts[self.window - 1 :]
        return min(first) == self.workers and min(coded) >= self.workers - self.slow
