# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Computes the steps of a `transfer` trial from a budget in minutes.

    minutes = compiling + sum over cells of rates * seeds * (steps * step + evaluation)

The seconds of a step are measured at every point before the first trial. The result is stored in
trials.jsonl: a sweep that is continued keeps its number of steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.studies.transfer.config import Cell, TransferConfig, cells_of
from experiments.studies.transfer.trial import MOST_PIECE

SIZES = "sizes"
"""Value of `kind` in the record of the sizes in trials.jsonl."""
FEWEST_STEPS = 3 * MOST_PIECE
_RESERVE = 0.9
"""Share of the budget that is planned for: the speed of a machine varies."""
_TIMED_STEPS = 10 * MOST_PIECE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StudySizes:
    """Number of steps that a budget allows."""

    steps: int
    """training.steps of the sweep."""
    label: str
    """Text that reports the choice."""


def timing_cells(config: TransferConfig) -> tuple[Cell, ...]:
    """Return the cells with a number of steps that every piece divides, for timing."""
    training = dataclasses.replace(config.training, steps=_TIMED_STEPS)
    return cells_of(dataclasses.replace(config, training=training))


def size_of(
    config: TransferConfig,
    cells: Sequence[Cell],
    timed: Mapping[tuple[str, float], tuple[float, float]],
    compiling: float,
) -> StudySizes:
    """Return the number of steps that a budget allows, in whole pieces.

    Args:
        config: Config of the sweep, with a budget.
        cells: Result of `timing_cells`.
        timed: Seconds of a step and of an evaluation, by arm and value.
        compiling: Seconds spent compiling.

    Raises:
        ValueError: The budget allows too few steps for a trial.
    """
    assert config.budget is not None
    arms = config.chosen_arms
    per_step = 0.0
    fixed = compiling
    number = 0
    for cell in cells:
        step, evaluation = timed[cell.arm, cell.value]
        # One rate beyond an edge of the grid is counted as expected.
        rates = len(config.rates_of(arms[cell.arm])) + min(config.extend, 1)
        runs = rates * config.seeds
        # Along the axes tokens and batch the number of steps differs between points.
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
    sentence = (
        f"time of a step: {each}. {config.budget:g} minutes allow {number} trials of {steps} steps,"
        " one rate beyond the grid at each point included:"
        f" about {minutes:.0f} minutes"
    )
    return StudySizes(steps=steps, label=sentence)
