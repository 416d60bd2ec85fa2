# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""From minutes to steps: how long every trial of a `transfer` sweep may be.

    minutes = compiling + sum over cells of rates * seeds * (steps * step + evaluation)

Seconds of a step are measured at every point, on this machine, before the first trial. The answer
is written down once: a sweep that is continued keeps its steps, however fast the machine is then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.studies.transfer.config import Cell, TransferConfig, cells_of
from experiments.studies.transfer.trial import MOST_PIECE

SIZES = "sizes"
"""`kind` of its record in trials.jsonl."""
FEWEST_STEPS = 3 * MOST_PIECE
_RESERVE = 0.9
"""Of the minutes: a machine does not keep its speed."""
_TIMED_STEPS = 10 * MOST_PIECE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What a budget bought."""

    steps: int
    """training.steps of the sweep."""
    words: str
    """How that came about."""


def timing_cells(config: TransferConfig) -> tuple[Cell, ...]:
    """The cells before their steps are known, with some that any number of pieces divides."""
    training = dataclasses.replace(config.training, steps=_TIMED_STEPS)
    return cells_of(dataclasses.replace(config, training=training))


def size_of(
    config: TransferConfig,
    cells: Sequence[Cell],
    timed: Mapping[tuple[str, float], tuple[float, float]],
    compiling: float,
) -> Sizes:
    """The steps that a budget allows, in whole pieces.

    Args:
        config: of the sweep, with a budget.
        cells: of `timing_cells`.
        timed: seconds of a step and of an evaluation, by arm and value.
        compiling: seconds that compiling took.

    Raises:
        ValueError: fewer than are worth a trial.
    """
    assert config.budget is not None
    arms = config.chosen_arms
    per_step, fixed, number = 0.0, compiling, 0
    for cell in cells:
        step, evaluation = timed[cell.arm, cell.value]
        # One rate beyond an edge is likely enough to be counted with the others.
        rates = len(config.rates_of(arms[cell.arm])) + min(config.extend, 1)
        runs = rates * config.seeds
        # Along tokens and batch a point has more steps, or fewer.
        per_step += runs * step * cell.config.training.steps / _TIMED_STEPS
        fixed += runs * evaluation
        number += runs
    seconds = 60.0 * config.budget * _RESERVE
    steps = int((seconds - fixed) / per_step) // MOST_PIECE * MOST_PIECE
    if steps < FEWEST_STEPS:
        least = (FEWEST_STEPS * per_step + fixed) / _RESERVE / 60.0
        raise ValueError(
            f"budget={config.budget:g} minutes are {max(steps, 0)} steps for each of {number}"
            f" trials on this machine, too few to tell rates apart: give --budget"
            f" {least + 0.5:.0f} or more, or fewer points, rates, seeds or arms"
        )
    each = ", ".join(
        f"{cell.arm} {cell.value:g}: {1e3 * timed[cell.arm, cell.value][0]:.0f} ms"
        for cell in cells
    )
    minutes = (steps * per_step + fixed) / 60.0
    words = (
        f"a step takes ({each}); {config.budget:g} minutes buy {number} trials of {steps} steps,"
        f" one rate beyond the grid at each point among them,"
        f" about {minutes:.0f} minutes"
    )
    return Sizes(steps=steps, words=words)
