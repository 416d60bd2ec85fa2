# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost models of measured steps: a table by compiled shape, and rates fitted to it.

A compiled step computes its padding too, so on a CPU its time depends on the shape and hardly on
what fills it: the table is exact where a formula is not. Three numbers are fitted to the table:
FLOP/s, bytes per second and a constant, by non-negative least squares of relative errors. An
operation counts as its FLOPs or its bytes, whichever takes longer by the rates of the iteration
before, as it does in `Roofline`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmoe.contrib.fleet.timing import Timing, timing_of
from jaxmoe.contrib.serving_lab.simulation.cost import Roofline, StepCost
from jaxmoe.optional import require
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.plan import Shapes

_ITERATIONS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableCost(Roofline):
    """Measured time of a step by its shape; bytes and FLOPs by formula, as in `Roofline`."""

    shapes: Shapes
    """Compiled shapes."""
    table: tuple[Timing, ...]
    """Time of each of them."""

    def cost(
        self, parts: Sequence[WorkPart], *, share: float = 1.0, nano_batches: int = 1
    ) -> StepCost:
        """Return seconds and bytes of a step; by formula where no compiled shape holds it.

        A policy may ask about such steps; an executor runs none.

        Args:
            parts: Work of each sequence.
            share: Share of the device; a compiled step takes all of it.
            nano_batches: Parts of the step; a compiled step is one program.
        """
        predicted = super().cost(parts, share=share, nano_batches=nano_batches)
        timing = timing_of(self.shapes, self.table, parts)
        return (
            predicted if timing is None else dataclasses.replace(predicted, seconds=timing.seconds)
        )

    @classmethod
    def of(cls, shapes: Shapes, table: Sequence[Timing], otherwise: Roofline) -> TableCost:
        """Return the cost model of a table.

        Args:
            shapes: Compiled shapes.
            table: Time of each of them.
            otherwise: Cost model of what no shape holds.
        """
        fields = {
            field.name: getattr(otherwise, field.name) for field in dataclasses.fields(otherwise)
        }
        return cls(**fields, shapes=shapes, table=tuple(table))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RateFit:
    """Rates that explain measured times."""

    cost: Roofline
    """Cost model with the fitted rates."""
    error: float
    """Median relative error on shapes that were left out of the fit, one at a time."""


def fit_rates(timings: Sequence[Timing], cost: Roofline) -> RateFit:
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
        remaining = [timing for i, timing in enumerate(timings) if i != left_out]
        left_timing = timings[left_out]
        guess = _fit(remaining, cost).seconds(left_timing.parts)
        errors.append(abs(guess / left_timing.seconds - 1))
    return RateFit(cost=_fit(timings, cost), error=statistics.median(errors))


def _fit(timings: Sequence[Timing], cost: Roofline) -> Roofline:
    """Return the cost model with the rates of the iteration with the smallest error."""
    optimize: Any = require("scipy.optimize")
    measured = np.array([timing.seconds for timing in timings])
    fitted = cost
    best = cost
    least = np.inf
    for _ in range(_ITERATIONS):
        rows = np.array([fitted.demands(timing.parts) for timing in timings])
        solution, _ = optimize.nnls(rows / measured[:, None], np.ones(len(timings)))
        constant, per_flop, per_byte = solution
        chip = dataclasses.replace(
            cost.chip,
            flops=1 / per_flop if per_flop else fitted.chip.flops * fitted.chip.efficiency,
            efficiency=1.0,
            memory_bandwidth=(
                1 / per_byte
                if per_byte
                else fitted.chip.memory_bandwidth * fitted.memory_efficiency
            ),
        )
        fitted = dataclasses.replace(
            cost, chip=chip, constant=float(constant), memory_efficiency=1.0
        )
        guess = np.array([fitted.seconds(timing.parts) for timing in timings])
        error = float(np.abs(guess / measured - 1).mean())
        if error < least:
            best = fitted
            least = error
    return best
