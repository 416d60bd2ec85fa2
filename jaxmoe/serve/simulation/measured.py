# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Times of steps measured with an executor: a table by compiled shape, and rates fitted to it.

A compiled step computes its padding too, so on a CPU its time depends on the shape and hardly on
what fills it: the table is exact where a formula is not. Three numbers are fitted to the table:
FLOP/s, bytes per second and a constant, by non-negative least squares of relative errors. An
operation counts as its FLOPs or its bytes, whichever takes longer by the rates of the iteration
before, as it does in `Roofline`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.optional import require
from jaxmoe.serve.blocks import num_pages
from jaxmoe.serve.device.config import ExecutorConfig
from jaxmoe.serve.engine import Executor
from jaxmoe.serve.facts import Part
from jaxmoe.serve.plan import Shapes
from jaxmoe.serve.requests import Sampling
from jaxmoe.serve.simulation.cost import Roofline, StepCost
from jaxmoe.serve.step import Step, Work

_ITERATIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median time of one compiled shape."""

    singles: int
    """Single tokens of the step."""
    pieces: tuple[int, int]
    """Number and length of the pieces beside them."""
    context_length: int
    """Tokens of a sequence that attention reads."""
    seconds: float

    @property
    def parts(self) -> list[Part]:
        """Work that fills the shape."""
        number, length = self.pieces
        singles = [Part(1, self.context_length - 1)] * self.singles
        return singles + [Part(length, max(self.context_length - length, 0))] * number


def measure_steps(executor: Executor, config: ExecutorConfig, repeats: int = 5) -> list[Timing]:
    """Return the median time of every compiled shape of an executor that is idle.

    The keys and values in the executor's pages are overwritten.

    Args:
        executor: Executor with compiled programs.
        config: Its sizes.
        repeats: Steps of each shape that are timed, after one that is not.
    """
    found = []
    for pieces, length in itertools.product(
        ((0, 0), *config.shapes.pieces), config.context_lengths
    ):
        step = _full_step(config, pieces, length)
        seconds = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            executor.run(step)
            seconds.append(time.perf_counter() - begun)
        found.append(
            Timing(
                singles=config.shapes.singles,
                pieces=pieces,
                context_length=length,
                seconds=statistics.median(seconds[1:]),
            )
        )
    return found


def _full_step(config: ExecutorConfig, pieces: tuple[int, int], length: int) -> Step:
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
        )

    singles = config.shapes.singles
    return Step(
        singles=tuple(work(i, 1) for i in range(singles)),
        pieces=tuple(work(singles + i, min(count, length)) for i in range(number)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCost(Roofline):
    """Measured time of a step by its shape; bytes and FLOPs by formula, as in `Roofline`."""

    shapes: Shapes
    """Compiled shapes."""
    table: tuple[Timing, ...]
    """Time of each of them."""

    def cost(self, parts: Sequence[Part], *, share: float = 1.0, nano_batches: int = 1) -> StepCost:
        """Return seconds and bytes of a step; by formula where no compiled shape holds it.

        A policy may ask about such steps; an executor runs none.

        Args:
            parts: Work of each sequence.
            share: Share of the device; a compiled step takes all of it.
            nano_batches: Parts of the step; a compiled step is one program.
        """
        found = super().cost(parts, share=share, nano_batches=nano_batches)
        # Parts of one token beyond the singles are the ends of prompts.
        counts = sorted(part.count for part in parts)
        pieces = self.shapes.fitting(counts[min(counts.count(1), self.shapes.singles) :])
        longest = max((part.context + part.count for part in parts), default=0)
        fit = [one for one in self.table if one.pieces == pieces and one.context_length >= longest]
        if not fit:
            return found
        seconds = min(fit, key=lambda one: one.context_length).seconds
        return dataclasses.replace(found, seconds=seconds)

    @classmethod
    def of(cls, shapes: Shapes, table: Sequence[Timing], otherwise: Roofline) -> TableCost:
        """Return the cost model of a table.

        Args:
            shapes: Compiled shapes.
            table: Time of each of them.
            otherwise: Cost model of what no shape holds.
        """
        fields = {one.name: getattr(otherwise, one.name) for one in dataclasses.fields(otherwise)}
        return cls(**fields, shapes=shapes, table=tuple(table))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Rates that explain measured times."""

    cost: Roofline
    """Cost model with the fitted rates."""
    error: float
    """Median relative error on shapes that were left out of the fit, one at a time."""


def fit_rates(timings: Sequence[Timing], cost: Roofline) -> Fit:
    """Return FLOP/s, bandwidth and constant of a device from measured times.

    A rate that no shape depends on keeps its nominal value.

    Args:
        timings: Times of at least four shapes.
        cost: Cost model with nominal rates.

    Raises:
        ValueError: There are too few shapes to leave one out.
    """
    if len(timings) < 4:
        raise ValueError(
            f"{len(timings)} shapes were measured, and three rates need four: compile more of them"
        )
    errors = []
    for left_out in range(len(timings)):
        others = [one for i, one in enumerate(timings) if i != left_out]
        known = timings[left_out]
        guess = _fit(others, cost).seconds(known.parts)
        errors.append(abs(guess / known.seconds - 1))
    return Fit(cost=_fit(timings, cost), error=statistics.median(errors))


def _fit(timings: Sequence[Timing], cost: Roofline) -> Roofline:
    """Return the cost model with the rates of the iteration with the smallest error."""
    optimize: Any = require("scipy.optimize")
    measured = np.array([one.seconds for one in timings])
    found, best, least = cost, cost, np.inf
    for _ in range(_ITERATIONS):
        rows = np.array([found.demands(one.parts) for one in timings])
        solution, _ = optimize.nnls(rows / measured[:, None], np.ones(len(timings)))
        constant, per_flop, per_byte = solution
        chip = dataclasses.replace(
            cost.chip,
            flops=1 / per_flop if per_flop else found.chip.flops * found.chip.efficiency,
            efficiency=1.0,
            memory_bandwidth=(
                1 / per_byte if per_byte else found.chip.memory_bandwidth * found.memory_efficiency
            ),
        )
        found = dataclasses.replace(
            cost, chip=chip, constant=float(constant), memory_efficiency=1.0
        )
        guess = np.array([found.seconds(one.parts) for one in timings])
        error = float(np.abs(guess / measured - 1).mean())
        if error < least:
            best, least = found, error
    return best
