# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures how costs grow with data, steps, requests and devices (`bench growth`).

Each point is a process of its own: the time of its processor, which other load changes less than
that of a clock, and the resident memory that the work added. The exponent of a curve is that of its
last two points: 0 is flat, 1 linear, 2 quadratic. What is linear has its cost per unit beside it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from experiments.bench.growth_curves import CURVES
from experiments.bench.step import BenchRunConfig
from experiments.cli.output import say
from jaxmoe.configs import closest

_EXPONENTS = (("exponent", "seconds", 0.05), ("memory_exponent", "bytes", 16e6))
"""Exponents, their costs, and the largest cost below which an exponent would be that of noise."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GrowthBenchConfig:
    """How costs grow with data, steps, requests and devices."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    curves: tuple[str, ...] = ()
    """Names of curves; empty for all of them."""
    divisor: int = 1
    """Divides all sizes, for a short try."""
    timeout: float = 300.0
    """Seconds that one point may take."""

    def __post_init__(self):
        for name in self.curves:
            if name not in CURVES:
                raise ValueError(
                    f"curves={name} is not one of {', '.join(CURVES)}{closest(name, CURVES)}"
                )
        if self.divisor < 1 or not 0.0 < self.timeout < math.inf:
            raise ValueError(
                f"divisor={self.divisor} must be at least 1, and timeout={self.timeout} above 0"
                " and finite"
            )


def bench_growth(config: GrowthBenchConfig) -> dict[str, Any]:
    """Measure, and return the numbers of summary.json.

    Raises:
        ValueError: A point fails, or takes too long.
    """
    names = config.curves or tuple(CURVES)
    return {"curves": {name: _measure(name, config) for name in names}}


def in_words(summary: dict[str, Any]) -> str:
    """Return the numbers as a table."""
    rows: list[tuple[str, ...]] = [
        ("", "sizes", "processor", "memory", "exponents", "at the largest, for each")
    ]
    for name, curve in summary["curves"].items():
        unit = curve["unit"]
        rows.append(
            (
                f"{name}: {curve['what']}",
                " ".join(f"{size:,}" for size in curve["sizes"]) + f" {unit}",
                " ".join(f"{seconds:.2f}" for seconds in curve["seconds"]) + " s",
                " ".join(f"{count / 1e6:.0f}" for count in curve["bytes"]) + " MB",
                ", ".join(
                    f"{curve[power]:.1f}" if curve[costs][-1] >= least else "-"
                    for power, costs, least in _EXPONENTS
                ),
                f"{curve['seconds'][-1] / curve['sizes'][-1] * 1e6:,.1f} us,"
                f" {curve['bytes'][-1] / curve['sizes'][-1] / 1e3:,.1f} kB",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def exponent(sizes: list[int], costs: list[float]) -> float:
    """Return the power of the size with which a cost grows, of the last two points.

    Args:
        sizes: Rising; equal ones have no exponent.
        costs: Of the sizes, not below 0.
    """
    before, last = (max(cost, 1e-9) for cost in costs[-2:])
    ratio = sizes[-1] / sizes[-2]
    return math.log(last / before) / math.log(ratio) if ratio > 1.0 else 0.0


def _measure(name: str, config: GrowthBenchConfig) -> dict[str, Any]:
    curve = CURVES[name]
    sizes = [max(1, size // config.divisor) for size in curve.sizes]
    points = []
    for size in sizes:
        say(f"{name}: {size:,} {curve.unit}")
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder) / "point"
            _run(name, size, place, config.timeout, "prepare")
            points.append(json.loads(_run(name, size, place, config.timeout).splitlines()[-1]))
    seconds, memory = (list(column) for column in zip(*points, strict=True))
    return {
        "what": curve.what,
        "unit": curve.unit,
        "sizes": sizes,
        "seconds": seconds,
        "bytes": memory,
        "exponent": exponent(sizes, seconds),
        "memory_exponent": exponent(sizes, memory),
    }


def _run(name: str, size: int, folder: pathlib.Path, timeout: float, *more: str) -> str:
    """Run a point in its process, and return what it prints."""
    module = "experiments.bench.growth_curves"
    command = [sys.executable, "-m", module, name, str(size), str(folder), *more]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"curve {name} took more than {timeout:g} s for {size:,}: set --timeout, or --divisor"
        ) from error
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:]
        raise ValueError(f"curve {name} failed for {size:,}: {' '.join(last)}") from error
    return result.stdout
