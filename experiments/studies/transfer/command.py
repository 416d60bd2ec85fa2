# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sweeps the learning rate at several sizes and reports how far the best one moves.

    jaxmoe transfer                                        width, within 30 minutes
    jaxmoe transfer --arms standard hyperp --axis depth
    jaxmoe transfer --points 64 256 --rates 0.002 0.004 0.008 --seeds 5
    jaxmoe transfer --check coordinates

Trains every arm at every point, rate and seed; a parabola in log rate gives the best rate. The same
command continues. Exit codes: 0 done, 1 check failed, 2 bad flags, 75 and 130 stopped by a signal.
"""

from __future__ import annotations

import dataclasses
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli import flags
from experiments.cli.output import say
from experiments.cli.tables import markdown_table, text_table
from experiments.studies.study import Study, StudyStoppedError, check_stop, run_study
from experiments.studies.transfer.arms import ARMS
from experiments.studies.transfer.axes import AXES
from experiments.studies.transfer.budget import SIZES, StudySizes, size_of, timing_cells
from experiments.studies.transfer.check import CoordinateCheck
from experiments.studies.transfer.config import (
    FREE_FIELDS,
    RECIPES,
    SPACING,
    Cell,
    TransferConfig,
    cells_of,
)
from experiments.studies.transfer.fits import Curve, find_optimum, fit_transfer
from experiments.studies.transfer.picture import draw_transfer
from experiments.studies.transfer.table import (
    LEGEND,
    arm_lines,
    arm_row,
    balance_rows,
    balance_sentence,
    curve_of,
    point_lines,
    point_row,
    sentence,
)
from experiments.studies.transfer.trial import (
    SweepData,
    SweepPrograms,
    program_key,
    seconds_of,
    train,
)
from experiments.studies.trials import Record, TrialsFile
from jaxmoe.resilience.stop import StopRequest
from jaxmoe.run.directory import RunDirectory
from jaxmoe.tracking.console import format_duration

PICTURE = "transfer.png"


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    return run_study(
        "transfer",
        RECIPES,
        argv,
        f"{__doc__}\n{_names()}",
        _open_study,
        free=FREE_FIELDS,
        name_of=_name_of,
        check=_check,
    )


def _name_of(recipe: str, config: TransferConfig) -> str:
    """Return the default name of a sweep or a check."""
    return "_".join([recipe, config.axis, *([] if config.check is None else [config.check])])


def _check(recipe: str, config: TransferConfig) -> None:
    """Refuse what does not fit before the directory is created."""
    _check_steps(config, RECIPES[recipe]())
    cells_of(config)


def _open_study(config: TransferConfig, directory: RunDirectory) -> Study:
    data = SweepData(config)
    if config.check is not None:
        return CoordinateCheck(config, directory, data)
    return Sweep(config, directory, data)


class Sweep:
    """The trials of one directory, those of earlier starts included.

    Raises:
        ValueError: The trials in the directory were of other data.
    """

    def __init__(self, config: TransferConfig, directory: RunDirectory, data: SweepData):
        self._config = config
        self._directory = directory
        self._data = data
        self._file = TrialsFile(directory.trials_file)
        self._programs: dict[Any, SweepPrograms] = {}
        self._records: dict[tuple[str, float, float, int], Record] = {}
        self._sizes: StudySizes | None = None
        for record in self._file.read(data.digest):
            if record.get("kind") == SIZES:
                self._sizes = StudySizes(
                    **{f.name: record[f.name] for f in dataclasses.fields(StudySizes)}
                )
            else:
                self._records[_key(record)] = record
        self._cells: tuple[Cell, ...] = ()

    def _choose_sizes(self, stop: StopRequest) -> None:
        """Choose the number of steps from the budget, if there is one, and the cells.

        Raises:
            ValueError: The budget is too small for this machine.
        """
        config = self._config
        if config.budget is not None and self._sizes is None:
            cells = timing_cells(config)
            timed = {}
            say(f"timing a step at each of {len(cells)} points, which compiles their programs")
            for cell in cells:
                if stop.reason is not None:
                    return
                timed[cell.arm, cell.value] = seconds_of(self._of(cell), cell, self._data)
            compiling = sum(programs.compile_seconds for programs in self._programs.values())
            self._sizes = size_of(config, cells, timed, compiling)
            record = {"kind": SIZES, "data": self._data.digest, **dataclasses.asdict(self._sizes)}
            self._file.append(record)
        if config.budget is not None and self._sizes is not None:
            say(self._sizes.label)
            training = dataclasses.replace(config.training, steps=self._sizes.steps)
            config = dataclasses.replace(config, training=training)
        self._cells = cells_of(config)
        self._say_plan()

    def run(self, stop: StopRequest) -> str:
        """Choose the steps, run every missing trial, and return the status."""
        with flags.exit_on_bad_configuration():
            self._choose_sizes(stop)
        try:
            for cell in self._cells:
                for rate in self._rates(cell):
                    self._run_rate(cell, rate, stop)
        except StudyStoppedError:
            pass
        return stop.reason or "done"

    def write(self, status: str, seconds: float) -> str:
        """Write summary.json and the picture; return the tables as text."""
        config = self._config
        unit = self._data.unit
        axis = AXES[self._config.axis]
        points = []
        arms = []
        curves = self._curves()
        for name, arm in config.chosen_arms.items():
            mine = curves.get(name, {})
            if len(mine) < 2:
                continue
            transfer = fit_transfer(mine)
            for value, curve in mine.items():
                violation = self._violation(name, value, curve)
                points.append(point_row(name, value, curve, transfer.optima.get(value), violation))
            bytes_per_token = 1.0 / self._data.tokens_per_unit
            arms.append(arm_row(name, transfer, config.axis in arm.claims, bytes_per_token))
        lines = point_lines(points, config.axis, unit)
        totals = arm_lines(arms)
        verdicts = [self._sentence(row, curves[row["arm"]]) for row in arms]
        verdicts += [
            f"{name}: not finished: fewer than two points have a rate"
            for name in config.chosen_arms
            if len(curves.get(name, {})) < 2
        ]
        balance = balance_rows(points) if config.axis == "balance" else []
        verdicts += map(balance_sentence, balance)
        picture = self._directory.plots_directory / PICTURE
        header = {"axis": config.axis, "words": axis.label, "unit": unit}
        draw_transfer(picture, points, arms, **header)
        spent = sum(self._records[key]["seconds"] for key in self._records)
        self._directory.write_summary(
            {
                "status": status,
                "axis": config.axis,
                "unit": unit,
                "seeds": config.seeds,
                "steps": self._cells[0].config.training.steps if self._cells else None,
                "points": points,
                "arms": arms,
                "balance": balance,
                "verdicts": verdicts,
                "markdown": f"{markdown_table(lines)}\n\n{markdown_table(totals)}",
                "picture": str(picture),
                "programs_compiled": len(self._programs),
                "compile_seconds": sum(p.compile_seconds for p in self._programs.values()),
                "trial_seconds": spent,
                "wall_seconds": seconds,
            }
        )
        if not arms:
            return f"{status}: no arm has two points yet; the same command continues"
        parts = [text_table(lines), text_table(totals), "\n".join(verdicts), LEGEND]
        took = f"{len(self._records)} trials took {format_duration(spent)}"
        ending = "" if status == "done" else f"\n{status}: the same command continues"
        return "\n" + "\n\n".join([*parts, f"{picture}; {took}{ending}"])

    def _sentence(self, row: Record, curves: Mapping[float, Curve]) -> str:
        """Return the verdict on an arm, and the points that lack a planned rate."""
        config = self._config
        planned = set(config.rates_of(config.chosen_arms[row["arm"]]))
        unfinished = [
            value
            for value in config.chosen_points
            if value not in curves or not planned <= set(curves[value].rates)
        ]
        unit = self._data.unit
        return sentence(row, config.axis, sorted(curves), unit, unfinished=unfinished)

    def _say_plan(self) -> None:
        config = self._config
        arms = config.chosen_arms
        points = config.chosen_points
        steps = " ".join(
            f"{steps}" for steps in dict.fromkeys(c.config.training.steps for c in self._cells)
        )
        say(
            f"{', '.join(arms)}; {config.axis} {' '.join(f'{value:g}' for value in points)};"
            f" {len(config.rates_of(next(iter(arms.values()))))} rates x {config.seeds} seeds at"
            f" each of {len(self._cells)} points; {steps} steps each"
        )
        stale = sum(not self._is_current(cell, r) for cell in self._cells for r in self._mine(cell))
        if stale:
            say(f"{stale} earlier trials had other settings (steps, base point) and are repeated")

    def _rates(self, cell: Cell) -> Iterator[float]:
        """Yield the rates of a cell, then rates beyond an edge of the grid where the best one
        is."""
        yield from self._config.rates_of(self._config.chosen_arms[cell.arm])
        points = self._config.chosen_points
        for _ in range(self._config.extend):
            curve = self._curve(cell.arm, cell.value)
            needed = None
            smallest = self._curve(cell.arm, points[0])
            if cell.value == points[-1] and smallest is not None:
                optimum = find_optimum(smallest)
                needed = None if optimum is None else optimum.rate  # for the regret
            beyond = None if curve is None else rate_beyond(curve, needed)
            if beyond is None:
                return
            yield beyond

    def _run_rate(self, cell: Cell, rate: float, stop: StopRequest) -> None:
        """Train all seeds at one rate of one cell."""
        started = time.perf_counter()
        is_new = False
        for seed in self._seeds:
            saved = self._records.get((cell.arm, cell.value, rate, seed))
            if saved is not None and self._is_current(cell, saved):
                continue
            check_stop(stop)
            record = train(self._of(cell), cell, rate, seed, self._data, stop)
            self._records[_key(record)] = record
            self._file.append(record)
            is_new = True
        if is_new:
            seed_records = [self._records[cell.arm, cell.value, rate, seed] for seed in self._seeds]
            bits = " ".join(
                "diverged" if r["bits"] is None else f"{r['bits']:.4f}" for r in seed_records
            )
            seconds = time.perf_counter() - started
            width = max(map(len, self._config.chosen_arms))
            where = f"{cell.arm:{width}} {self._config.axis} {cell.value:<6g} rate {rate:<9.4g}"
            say(f"{where} {bits} {self._data.unit} by seed ({seconds:.0f} s)")

    @property
    def _seeds(self) -> range:
        first = self._config.training.seed
        return range(first, first + self._config.seeds)

    def _of(self, cell: Cell) -> SweepPrograms:
        key = program_key(cell)
        if key not in self._programs:
            self._programs[key] = SweepPrograms(cell, self._data.held_out[0])
        return self._programs[key]

    def _is_current(self, cell: Cell, record: Record) -> bool:
        return record["cell"] == cell.digest

    def _mine(self, cell: Cell) -> list[Record]:
        return [r for key, r in self._records.items() if key[:2] == (cell.arm, cell.value)]

    def _curve(self, arm: str, value: float) -> Curve | None:
        cell = next(c for c in self._cells if (c.arm, c.value) == (arm, value))
        current = [r for r in self._mine(cell) if self._is_current(cell, r)]
        return curve_of(current, self._seeds)

    def _curves(self) -> dict[str, dict[float, Curve]]:
        curves: dict[str, dict[float, Curve]] = {}
        for cell in self._cells:
            curve = self._curve(cell.arm, cell.value)
            if curve is not None:
                curves.setdefault(cell.arm, {})[cell.value] = curve
        return curves

    def _violation(self, arm: str, value: float, curve: Curve) -> float | None:
        """Return max violation at the best rate of the grid, as a mean over seeds."""
        means = curve.losses.mean(1)
        if not np.isfinite(means).any():
            return None
        rate = curve.rates[int(np.nanargmin(means))]
        violations = [self._records[arm, value, rate, s]["max_violation"] for s in self._seeds]
        return None if None in violations else float(np.mean(violations))


def _names() -> str:
    """Return the axes and arms, for `--help`."""
    axes = ", ".join(f"{name} ({axis.label})" for name, axis in AXES.items())
    arms = [f"  {name}  {arm.words}" for name, arm in ARMS.items()]
    return "\n".join([textwrap.fill(f"Axes: {axes}.", 100), "", "Arms:", *arms])


def _check_steps(config: TransferConfig, default: TransferConfig) -> None:
    """Refuse a number of steps together with a budget."""
    if config.budget is not None and config.training.steps != default.training.steps:
        raise ValueError(
            f"training.steps={config.training.steps} and budget={config.budget:g} minutes both"
            " decide the steps: leave one of them out (--budget None)"
        )


def rate_beyond(curve: Curve, needed: float | None = None) -> float | None:
    """Return the next rate to try when the grid ends too early; None when it does not, or diverges.

    Args:
        curve: Losses so far.
        needed: A rate that the grid is to reach as well.
    """
    x, losses = curve.known_losses
    lowest = curve.rates[0]
    highest = curve.rates[-1]
    best = int(losses.mean(1).argmin()) if len(x) else 0
    if best == 0 and (not len(x) or 2 ** x[0] < lowest * 1.001):
        return lowest / SPACING
    if best == len(x) - 1 and not curve.diverged_rates:
        return highest * SPACING
    if needed is not None and needed > highest:
        return highest * SPACING
    if needed is not None and needed < lowest:
        return lowest / SPACING
    return None


def _key(record: Record) -> tuple[str, float, float, int]:
    return record["arm"], record["value"], record["rate"], record["seed"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
