# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compares attention by level with static context parallelism, by the cost model of a chip.

    jaxmoe levels qwen3_30b_a3b --topology gpu:h100:16 --execution.mesh.seq 16

Lengths of documents are drawn from a log-normal distribution, cut at --training.sequence_length and
packed by best fit into the rows of each step. Static context parallelism attends to every row in
one ring over mesh.seq; the assigners of training.assign pack the documents of the step again into
micro-batches by level. All are priced by `jaxmoe/contrib/levels/pricing.py`; nothing is measured.
Times are of one step: all micro-batches, forward and backward, without the update.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import say
from experiments.cli.tables import text_table
from experiments.plan.config import step_plan
from experiments.recipes import RECIPES as PRETRAIN_RECIPES
from jaxmoe.contrib.levels import ASSIGNERS
from jaxmoe.contrib.levels.by_level import LevelsConfig
from jaxmoe.contrib.levels.pricing import level_packing
from jaxmoe.contrib.levels.rows import Forecast
from jaxmoe.data.packing import best_fit
from jaxmoe.planning.hardware import parse_topology
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory

HEADINGS = ("packing", "seconds", "micro-batches", "of static", "assigned in", "tokens by degree")
DEFAULT = "qwen3_30b_a3b"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LengthsConfig:
    """Log-normal distribution of the lengths of documents."""

    median: float = 2048.0
    """Median, in tokens."""
    sigma: float = 1.5
    """Standard deviation of the natural logarithm."""
    steps: int = 8
    """Steps whose mean is printed."""
    seed: int = 0
    """Seed of the lengths."""

    def __post_init__(self):
        is_finite = math.isfinite(self.median) and math.isfinite(self.sigma)
        if not is_finite or self.median < 2 or self.sigma < 0 or self.steps < 1:
            raise ValueError(
                f"lengths.median={self.median} must be at least 2, lengths.sigma={self.sigma} at"
                f" least 0, both finite, and lengths.steps={self.steps} at least 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LevelsStudyConfig(PretrainConfig):
    """A pre-training run whose micro-batches are priced."""

    topology: str = "gpu:h100:16"
    """Devices, which need not be attached: tpu:v5e:16x16, gpu:h100:16."""
    lengths: LengthsConfig = LengthsConfig()
    """Lengths of the documents."""


def _study(make: Callable[[], PretrainConfig]) -> Callable[[], LevelsStudyConfig]:
    def recipe() -> LevelsStudyConfig:
        config = make()
        names = [field.name for field in dataclasses.fields(PretrainConfig)]
        fields: dict[str, Any] = {name: getattr(config, name) for name in names}
        mesh = dataclasses.replace(config.execution.mesh, data=1, seq=16)
        fields["execution"] = dataclasses.replace(
            config.execution, mesh=mesh, sequence_parallel=LevelsConfig()
        )
        fields["training"] = dataclasses.replace(
            config.training, sequence_length=131072, batch_size=8, accumulation=8, batch_ramp=None
        )
        return LevelsStudyConfig(**fields)

    recipe.__doc__ = make.__doc__  # --help shows its first line
    return recipe


RECIPES = {name: _study(make) for name, make in PRETRAIN_RECIPES.items()}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    started = time.perf_counter()
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, "jaxmoe levels", __doc__ or "")
    directory = RunDirectory(config.run.directory or f"runs/levels/{config.run.name or recipe}")
    with cli.exit_on_bad_configuration():
        directory.check_free_of_runs()
        with directory.held():
            rows, forecasts = compare(config)
            say(text_table(rows))
            summary = {"status": "done", "recipe": recipe, "topology": config.topology}
            figures = {
                name: {"seconds": forecast.seconds, "ratio": forecast.static / forecast.seconds}
                for name, forecast in forecasts.items()
            }
            seconds = time.perf_counter() - started
            directory.write_summary(summary | {"assign": figures, "wall_seconds": seconds})
    return int(cli.ExitCode.DONE)


def compare(config: LevelsStudyConfig) -> tuple[list[tuple[str, ...]], dict[str, Forecast]]:
    """Return a table with a row for every assigner, and the mean step of each.

    Args:
        config: Run, devices and lengths.

    Raises:
        ValueError: The mesh does not fit the devices or the batch.
    """
    topology = parse_topology(config.topology)
    mesh = config.execution.mesh.resolve(topology.num_devices)
    plan = step_plan(config, topology, mesh)
    rows = draw_rows(config.lengths, plan.sequence_length, plan.batch_size)
    forecasts: dict[str, Forecast] = {}
    table: list[tuple[str, ...]] = [HEADINGS]
    for assigner in ASSIGNERS.values():
        packing = level_packing(plan, assigner(), topology.chip)
        start_time = time.perf_counter()
        forecasts[assigner.name] = mean = _mean([packing.forecast(step) for step in rows])
        if len(table) == 1:
            number = f"{mean.static_micro_batches:.1f}"
            table.append(("static", f"{mean.static:.3f}", number, "1.00", "", ""))
        table.append(
            (
                assigner.name,
                f"{mean.seconds:.3f}",
                f"{mean.micro_batches:.1f}",
                f"{mean.static / mean.seconds:.2f}",
                f"{(time.perf_counter() - start_time) / len(rows):.2f} s",
                ", ".join(f"{d}: {share:.0%}" for d, share in mean.shares.items()),
            )
        )
    return table, forecasts


def draw_rows(lengths: LengthsConfig, length: int, rows: int) -> list[list[list[int]]]:
    """Return the lengths of the documents of each row of each step.

    Args:
        lengths: Distribution.
        length: Tokens of a row, S.
        rows: Rows of a step.
    """
    rng = np.random.default_rng(lengths.seed)
    steps = []
    for _ in range(lengths.steps):
        drawn = list[int]()
        tokens_left = rows * length
        while tokens_left > 0:
            length_drawn = rng.lognormal(np.log(lengths.median), lengths.sigma)
            drawn.append(int(np.clip(length_drawn, 1, length)))
            tokens_left -= drawn[-1]
        ordered = np.sort(np.array(drawn[:-1] if tokens_left < 0 else drawn))[::-1]
        places = best_fit(ordered, length)
        packed = [ordered[places == row].tolist() for row in range(int(places.max()) + 1)]
        packed += [[] for _ in range(rows - len(packed))]
        steps.append(packed[:rows])
    return steps


def _mean(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the mean of some steps."""

    def mean(name: str) -> float:
        return float(np.mean([getattr(forecast, name) for forecast in forecasts]))

    degrees = forecasts[0].shares
    return Forecast(
        shares={d: float(np.mean([forecast.shares[d] for forecast in forecasts])) for d in degrees},
        micro_batches=mean("micro_batches"),
        seconds=mean("seconds"),
        static_micro_batches=mean("static_micro_batches"),
        static=mean("static"),
    )


if __name__ == "__main__":
    run_command(main)
