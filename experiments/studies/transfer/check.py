# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Runs `transfer --check coordinates`: does any activation, or its change, grow with size?

Every arm takes a few steps at its own rate (the middle of its grid) at every point, with every
seed; `experiments/studies/transfer/coordinates.py` measures and judges. The check takes a minute, a
sweep half an hour; a rate may fail to transfer for reasons that the check does not see.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.cli.output import say
from experiments.cli.tables import markdown_table, text_table
from experiments.studies.study import StudyStoppedError, check_stop
from experiments.studies.transfer.config import Cell, TransferConfig, cells_of
from experiments.studies.transfer.coordinates import (
    FALL,
    GROWTH,
    QUANTITIES,
    Coordinate,
    coordinates_of,
    observe,
    sizes,
)
from experiments.studies.transfer.trial import EXECUTION, SweepData, SweepPrograms
from jaxmoe.optional import require
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.plots import figure_of_panels, save_figure

PICTURE = "coordinates.png"
HEADINGS = [
    "arm",
    "quantity",
    "value at 0",
    "value at the end",
    "change at 1",
    "change at the end",
    "verdict",
]
_FACTORS = 1024
LEGEND = (
    f"a quantity passes where neither it nor its change grows faster than the axis ^{GROWTH:g}, and"
    f" its change after the last step\nfalls no faster than ^{FALL:g}; numbers are exponents of the"
    " axis: slopes of log RMS, mean over seeds"
)


class CoordinateCheck:
    """The check of one directory; nothing of it is kept when it is stopped."""

    def __init__(self, config: TransferConfig, directory: RunDirectory, data: SweepData):
        self._config = config
        self._directory = directory
        self._data = data
        self._measured: dict[str, dict[str, np.ndarray]] = {}
        self._results: dict[str, dict[str, Any]] = {}
        self._lines: list[list[str]] = [HEADINGS]
        self._verdicts: list[str] = []

    def run(self, stop: StopRequest) -> str:
        """Check every arm; return "failed" where one fails that claims to keep its rate."""
        cells = cells_of(self._config)
        is_bad = False
        try:
            for name, arm in self._config.chosen_arms.items():
                mine = [cell for cell in cells if cell.arm == name]
                is_claimed = self._config.axis in arm.claims
                passes = self._check_arm(name, mine, is_claimed, stop)
                is_bad |= is_claimed and not passes
        except StudyStoppedError:
            return str(stop.reason)
        return "failed" if is_bad else "done"

    def _check_arm(
        self, name: str, cells: Sequence[Cell], is_claimed: bool, stop: StopRequest
    ) -> bool:
        """Measure and judge one arm; return whether it passes."""
        config = self._config
        measured = measure(config, cells, self._data, stop)
        coordinates = coordinates_of(config.chosen_points, measured)
        self._measured[name] = measured
        self._lines += [_line(name, coordinate) for coordinate in coordinates]
        problems = [f"{c.quantity}: {c.problem}" for c in coordinates if c.problem is not None]
        verdict = _verdict(name, config.axis, problems, is_claimed)
        say(verdict)
        self._verdicts.append(verdict)
        self._results[name] = {
            "passes": not problems,
            "claims_transfer": is_claimed,
            "rate": config.chosen_arms[name].optimizer.learning_rate,
            "problems": problems,
            "coordinates": [dataclasses.asdict(coordinate) for coordinate in coordinates],
            "measured": {key: array.tolist() for key, array in measured.items()},
        }
        return not problems

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return the table as text."""
        del seconds
        if status not in ("done", "failed"):
            return f"{status}: a check saves nothing; run the same command to repeat it"
        config = self._config
        picture = self._directory.plots_directory / PICTURE
        draw_coordinates(picture, self._measured, config.chosen_points, axis=config.axis)
        summary = {
            "status": "done",
            "check": "coordinates",
            "axis": config.axis,
            "points": list(config.chosen_points),
            "seeds": config.seeds,
            "steps": config.check_steps,
            "passes": {name: result["passes"] for name, result in self._results.items()},
            "arms": self._results,
            "verdicts": self._verdicts,
            "markdown": markdown_table(self._lines),
            "picture": str(picture),
        }
        self._directory.write_summary(summary)
        return f"\n{text_table(self._lines)}\n\n{LEGEND}\n\n{picture}"


def measure(
    config: TransferConfig, cells: Sequence[Cell], data: SweepData, stop: StopRequest
) -> dict[str, np.ndarray]:
    """Return value and change of every quantity of one arm, [points seeds steps+1 2].

    Args:
        config: Config of the sweep.
        cells: Cells of the arm, by point.
        data: Data of the sweep.
        stop: Checked before every step.

    Raises:
        StoppedError: A signal arrived.
    """
    measurements = np.zeros((len(QUANTITIES), len(cells), config.seeds, config.check_steps + 1, 2))
    for place, cell in enumerate(cells):
        programs = SweepPrograms(cell, data.held_out[0])
        look = jax.jit(partial(observe, cell.plan.model, EXECUTION))
        tokens = jnp.asarray(data.held_out[0].tokens)
        rate = jnp.float32(cell.config.optimizer.learning_rate)
        for run in range(config.seeds):
            seed = config.training.seed + run
            training = dataclasses.replace(cell.with_seed(seed), steps=config.check_steps)
            state = programs.init(jax.random.key(seed))
            first = look(state.params, state.router_state, tokens)
            rows = [sizes(first, first)]
            for batches in data.pieces(training, 1):
                check_stop(stop)
                # A constant rate: during the warm-up of a schedule nothing would change.
                arguments = (rate, jnp.ones(_FACTORS, jnp.float32), batches)
                state, _ = programs.train_piece(state, *arguments)
                rows.append(sizes(look(state.params, state.router_state, tokens), first))
            for index, name in enumerate(QUANTITIES):
                measurements[index, place, run] = jax.device_get([row[name] for row in rows])
    return dict(zip(QUANTITIES, measurements, strict=True))


def _line(arm: str, coordinate: Coordinate) -> list[str]:
    values = coordinate.value_slopes
    changes = coordinate.change_slopes
    slopes = (values[0], values[-1], changes[0], changes[-1])
    return [
        arm,
        coordinate.quantity,
        *(f"{slope:+.2f}" for slope in slopes),
        coordinate.problem or "passes",
    ]


def _verdict(arm: str, axis: str, problems: Sequence[str], is_claimed: bool) -> str:
    if not problems:
        return f"{arm}: passes: nothing grows with {axis}"
    expected = "" if is_claimed else f" (it does not claim to keep its rate over {axis})"
    return f"{arm}: fails{expected}: {'; '.join(problems)}"


def draw_coordinates(
    path: str | os.PathLike[str],
    measured: Mapping[str, Mapping[str, np.ndarray]],
    points: Sequence[float],
    *,
    axis: str,
) -> None:
    """Draw one PNG file: a row per arm, a panel per quantity, its change by step.

    Args:
        path: Path of the file.
        measured: Results of `measure`, by arm.
        points: Values of the axis.
        axis: Name of the axis.

    Raises:
        MissingPackageError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    colors = require("matplotlib").colormaps["viridis"]
    figure, panels = figure_of_panels(
        width=14.0, height=2.6 * len(measured) + 0.4, rows=len(measured), columns=len(QUANTITIES)
    )
    places = iter(panels)
    for arm, quantities in measured.items():
        for name, array in quantities.items():
            axes = next(places)
            steps = array.shape[2] - 1
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(points, [f"{value:g}" for value in points])
            axes.set_xlabel(axis)
            axes.set_title(f"{arm}: {name}", fontsize=9, loc="left")
            _draw_lines(axes, points, array, steps, colors)
    panels[0].legend(loc="best", frameon=False, fontsize=7)
    panels[0].set_ylabel("RMS of the change")
    save_figure(figure, path)


def _draw_lines(axes: Any, points: Sequence[float], array: np.ndarray, steps: int, colors: Any):
    """Draw the initial value, dashed, and the change after each step."""
    axes.plot(points, array[:, :, 0, 0].mean(1), color="black", ls="--", lw=1, label="at first")
    for step in range(1, steps + 1):
        change = array[:, :, step, 1].mean(1)
        color = colors(0.9 * (1 - step / steps))
        axes.plot(points, change, color=color, marker="o", ms=3, label=f"change, step {step}")
