# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the compiled steps of a run's model here, as a cost model of the simulator."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from jaxmoe.contrib.fleet.timing import Timing, measure_steps
from jaxmoe.contrib.serving_lab.simulation import ModelSizes, Roofline
from jaxmoe.contrib.serving_lab.simulation.measured import RateFit, TableCost, fit_rates
from jaxmoe.planning.attached import attached_chip
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.serving import ServedCheckpoint, load_model, open_executor
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.sizes import EngineSizesConfig
from jaxmoe.tracking import read_router_load

_MOST_WAITING = 2**20
_LAST = 100
"""Records of the loads of experts that are averaged."""

CostSource = Literal["auto", "roofline", "table", "fit"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """Cost model and sizes of an instance that serves a run here."""

    name: str
    """Name of the run and kind of device."""
    cost: Roofline
    facts: Facts
    description: str
    """Lines on what was measured, and which times are used."""
    summary: dict[str, Any]
    """The same for `summary.json`."""


def measure_run(
    path: str, sizes: EngineSizesConfig, repeats: int, source: CostSource = "auto"
) -> MeasuredRun:
    """Compile the steps of a run's model and time them.

    Args:
        path: Run directory.
        sizes: Sizes of the engine.
        repeats: Steps of each shape that are timed.
        source: Which times the cost model takes; "auto" is the table on a CPU, else the fit.

    Raises:
        ValueError: The run cannot be served, or too few shapes are compiled for a fit.
    """
    loaded = load_model(ServedCheckpoint(path=path))
    executor = open_executor(loaded, sizes).executor
    assembly = loaded.assembly
    if "pages" not in executor.facts(max_waiting=1).capabilities:
        raise ValueError(
            f"run.directory={path} has no keys and values, and the simulator plans pages of them:"
            " measure a run that writes from left to right"
        )
    timings = measure_steps(executor, executor.config, repeats)
    platform = jax.default_backend()
    if source == "auto":
        source = "table" if platform == "cpu" else "fit"
    # Nominal rates are replaced by the fitted ones, where there are any.
    chip = attached_chip(jax.local_devices()[0])
    sizes_of_model = ModelSizes.of(assembly.plan.model)
    loads = loads_of_run(path, sizes_of_model)
    nominal = Roofline(sizes=sizes_of_model, chip=chip, loads=loads)
    is_needed = source == "fit"
    has_fit = is_needed or (len(timings) >= 4 and importlib.util.find_spec("scipy") is not None)
    fit = fit_rates(timings, nominal) if has_fit else None
    cost = fit.cost if fit is not None and source != "roofline" else nominal
    if source == "table":
        cost = TableCost.of(executor.config.shapes, timings, cost)
    facts = dataclasses.replace(executor.facts(max_waiting=_MOST_WAITING), cost=cost)
    return MeasuredRun(
        name=f"{pathlib.Path(path).resolve().name} on {platform}",
        cost=cost,
        facts=facts,
        description=_describe(timings, fit, source, platform, nominal),
        summary={
            "cost": source,
            "platform": platform,
            "shapes": [dataclasses.asdict(timing) for timing in timings],
            "fit": fit and _rates(fit),
        },
    )


def loads_of_run(path: str, sizes: ModelSizes) -> tuple[tuple[float, ...], ...]:
    """Return the share of the assignments of each expert in each MoE layer at the end of a run.

    Args:
        path: Run directory.
        sizes: Its model.

    Returns:
        Means over the last records of `router.npz`; empty where there are none of these experts.
    """
    file = RunDirectory(path).router_file
    load = read_router_load(file)[1] if file.exists() else np.zeros((0, 0, 0))
    if not len(load) or load.shape[1:] != (sizes.moe_layers, sizes.num_experts):
        return ()
    return tuple(map(tuple, load[-_LAST:].mean(axis=0, dtype=np.float64).tolist()))


def _rates(fit: RateFit) -> dict[str, float]:
    chip = fit.cost.chip
    rates = {"flops": chip.flops, "memory_bandwidth": chip.memory_bandwidth}
    return rates | {"constant": fit.cost.constant, "error": fit.error}


def _describe(
    timings: list[Timing], fit: RateFit | None, source: str, platform: str, nominal: Roofline
) -> str:
    """Return a line for each shape, on the fit, on the experts, and on the times that are used."""
    lines = []
    for timing in timings:
        number, length = timing.pieces
        pieces = f" + {number}x{length}" if number else ""
        shape = f"{timing.singles}x1{pieces}, context {timing.context_length}"
        lines.append(f"  {shape}: {1e3 * timing.seconds:.2f} ms")
    if fit is not None:
        rates = _rates(fit)
        lines.append(
            f"  fitted: {rates['flops']:.3g} FLOP/s, {rates['memory_bandwidth']:.3g} bytes/s,"
            f" {1e3 * rates['constant']:.3g} ms a step; median error on a shape left out"
            f" {fit.error:.1%}"
        )
    if nominal.loads:
        most = timings[0].singles
        even = dataclasses.replace(nominal, loads=())
        read = [timing.distinct_experts(most) for timing in (nominal, even)]
        lines.append(
            f"  {most} tokens choose {read[0]:.1f} of the {nominal.sizes.num_experts} experts of a"
            f" layer by the run's loads, {read[1]:.1f} by equal ones"
        )
    names = {"table": "of its shape", "fit": "by the fitted rates", "roofline": "by nominal rates"}
    head = f"{len(timings)} compiled shapes on {platform}; a step takes the time {names[source]}:"
    return "\n".join([head, *lines])
