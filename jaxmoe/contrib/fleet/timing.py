# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the time of every compiled shape of an executor, for policies and the simulator."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.step import EngineStep, Work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Time of one compiled shape."""

    singles: int
    """Single tokens of the step."""
    pieces: tuple[int, int]
    """Number and length of the pieces beside them."""
    context_length: int
    """Tokens of a sequence that attention reads."""
    seconds: float

    @property
    def parts(self) -> list[WorkPart]:
        """Work that fills the shape."""
        number, length = self.pieces
        singles = [WorkPart(1, self.context_length - 1)] * self.singles
        return singles + [WorkPart(length, max(self.context_length - length, 0))] * number


def measure_steps(
    executor: Any,
    config: ExecutorConfig,
    repeats: int = 5,
    pick: Callable[[Sequence[float]], float] = statistics.median,
) -> list[Timing]:
    """Return the time of every compiled shape of an executor that serves nothing.

    The keys and values in the executor's pages are overwritten.

    Args:
        executor: `Executor` with compiled programs.
        config: Its sizes.
        repeats: Steps of each shape that are timed, after one that is not.
        pick: Returns the time of a shape from those of its steps.
    """
    timings = []
    for pieces, length in itertools.product(
        ((0, 0), *config.shapes.pieces), config.context_lengths
    ):
        step = _full_step(config, pieces, length)
        seconds = []
        for _ in range(repeats + 1):
            start_time = time.perf_counter()
            executor.run(step)
            seconds.append(time.perf_counter() - start_time)
        timings.append(
            Timing(
                singles=config.shapes.singles,
                pieces=pieces,
                context_length=length,
                seconds=pick(seconds[1:]),
            )
        )
    return timings


def _full_step(config: ExecutorConfig, pieces: tuple[int, int], length: int) -> EngineStep:
    """Return a step that fills a shape, all of its sequences on the same pages."""
    number, count = pieces
    pages = tuple(range(num_pages(length, config.page_size)))

    def work(id_: int, tokens: int) -> Work:
        return Work(
            id=id_,
            tokens=(1,) * tokens,
            start=max(length - tokens, 0),
            pages=pages,
            draws=True,
            index=0,
            sampling=Sampling(temperature=0.0),
            history=(1,) * length,
        )

    singles = config.shapes.singles
    return EngineStep(
        singles=tuple(work(i, 1) for i in range(singles)),
        pieces=tuple(work(singles + i, min(count, length)) for i in range(number)),
    )


def timing_of(shapes: Shapes, table: Sequence[Timing], parts: Sequence[WorkPart]) -> Timing | None:
    """Return the measured shape that holds a step; None if there is none.

    Args:
        shapes: Compiled shapes.
        table: Time of each of them.
        parts: Work of the step.
    """
    # Parts of one token beyond the singles are the ends of prompts.
    counts = sorted(part.count for part in parts)
    pieces = shapes.fitting(counts[min(counts.count(1), shapes.singles) :])
    longest = max((part.context + part.count for part in parts), default=0)
    fit = [
        timing for timing in table if timing.pieces == pieces and timing.context_length >= longest
    ]
    return min(fit, key=lambda timing: timing.context_length, default=None)


class MeasuredSteps:
    """Measured times of one instance, as `jaxmoe.contrib.fleet.scaling.Hardware`.

    Instances have their weights before they join, and the time of a change of devices is not known
    before it: both count as nothing. On numbers of devices that were not measured yet a step is
    taken to be as much faster as there are more of them.
    """

    def __init__(self, shapes: Shapes, tables: dict[int, list[Timing]], num_chips: int):
        """Take times that were measured.

        Args:
            shapes: Compiled shapes.
            tables: Time of each shape by the number of devices.
            num_chips: Number of devices of the instance; the nearest in `tables` is scaled to it.
        """
        self._shapes = shapes
        self._tables = tables
        self._num_chips = num_chips

    @classmethod
    def of(cls, executor: Any, num_chips: int, repeats: int = 3) -> MeasuredSteps:
        """Return the times of an executor that is idle; its pages are overwritten.

        Args:
            executor: `ModelExecutor`.
            num_chips: Its devices.
            repeats: Steps of each shape that are timed.
        """
        steps = cls(executor.config.shapes, {}, num_chips)
        steps.measure(executor, num_chips, repeats)
        return steps

    def measure(
        self,
        executor: Any,
        num_chips: int,
        repeats: int = 3,
        pick: Callable[[Sequence[float]], float] = statistics.median,
    ) -> None:
        """Measure the steps on another number of devices, if that is not known yet.

        Args:
            executor: Executor on these devices, which serves nothing.
            num_chips: Their number.
            repeats: Steps of each shape that are timed.
            pick: Returns the time of a shape from those of its steps.
        """
        if num_chips not in self._tables:
            self._tables[num_chips] = measure_steps(executor, executor.config, repeats, pick)
            executor.reset()

    def seconds(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> float:
        """Return the seconds of a step; of the steps that it takes where no shape holds it.

        Args:
            parts: Work of each sequence.
            share: Share of the device; a compiled step takes all of it.
            nano_batches: Parts of the step; a compiled step is one program.
        """
        del share, nano_batches
        is_measured = self._num_chips in self._tables
        nearest = self._num_chips if is_measured else min([*self._tables], key=self._distance)
        table = self._tables[nearest]
        timing = timing_of(self._shapes, table, parts)
        if timing is not None:
            return timing.seconds * nearest / self._num_chips
        # The largest shape, as often as the tokens of prompts need it.
        largest = max(table, key=lambda entry: (math.prod(entry.pieces), entry.context_length))
        tokens = sum(part.count for part in parts if part.count > 1)
        rows = -(-sum(part.count == 1 for part in parts) // self._shapes.singles)
        times = max(-(-tokens // max(math.prod(largest.pieces), 1)), rows, 1)
        return times * largest.seconds * nearest / self._num_chips

    def on_chips(self, num_chips: int) -> MeasuredSteps:
        """Return the times on another number of devices, with the same tables."""
        return MeasuredSteps(self._shapes, self._tables, num_chips)

    def loading_seconds(self) -> float:
        """Return 0: every instance has its weights."""
        return 0.0

    def resharding_seconds(self, num_chips: int) -> float:
        """Return 0: a change is begun when it is decided."""
        del num_chips
        return 0.0

    def _distance(self, number: int) -> float:
        return abs(math.log(number / self._num_chips))
