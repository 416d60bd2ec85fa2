# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Simulates policies of batching, dispatch, retention and scaling, and compares their goodput.

    jaxmoe serving simulate
    jaxmoe serving simulate --batching split_fuse prefill_first --rates 8 12
    jaxmoe serving simulate --instances 4 --dispatch round_robin least_loaded
    jaxmoe serving simulate --instances 8 --dispatch pd_serve prfaas saga
    jaxmoe serving simulate --instances 8 --scaling fixed slo:interval=2 polca
    jaxmoe serving simulate workload:file --workload.path BurstGPT_1.csv
    jaxmoe serving simulate --run.directory runs/pretrain/tiny

A policy's own fields stand behind its name: NAME:FIELD=VALUE,FIELD=VALUE. By default `slo` and
`elastic_experts` decide every 60 seconds: in a shorter workload, give them a shorter interval.

The instances and policies are those of the engine; the time of a step is that of a roofline. With
the directory of a trained run, its model is compiled as it is served here (`engine`), and the time
of a step is the median of its compiled shape, or that of a roofline whose rates are fitted to these
medians (`cost`); experts are read as the loads of the run's last records say. Prints a line per
policy and rate:

    goodput/s    requests per second within ttft and tpot
    within SLO   their share of all requests
    ttft, tpot   seconds until the first token, milliseconds per further token, median / 99%
    expert GB    bytes of expert weights read
    copies       between device and host memory, of what a policy of retention swaps
    J/token      energy of all instances that are on, by approximate watts of the device

Writes summary.json, report.html and plots/goodput.png, for a run into its folder simulate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.serving.picture import draw_goodput, write_report
from experiments.studies.study import StudyRunConfig
from jaxmoe.configs import closest
from jaxmoe.contrib.fleet.dispatch import DISPATCH, DispatchConfig
from jaxmoe.contrib.fleet.scaling import SCALING
from jaxmoe.contrib.fleet.serving import FleetSizesConfig
from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.simulation import (
    Arrival,
    ModelSizes,
    Roofline,
    Simulation,
    Workload,
    measure,
)
from jaxmoe.contrib.serving_lab.simulation.workload import GammaConfig
from jaxmoe.contrib.serving_lab.timing import CostSource, measure_run
from jaxmoe.models.presets import PRESETS
from jaxmoe.optional import require
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.run.directory import RunDirectory
from jaxmoe.serve.facts import Facts
from jaxmoe.serve.policies.retention import RETENTION
from jaxmoe.serve.requests import LatencyObjective

HEADINGS = (
    "policy",
    "rate/s",
    "goodput/s",
    "within SLO",
    "ttft s",
    "tpot ms",
    "tokens/s",
    "preempted",
    "cached",
    "moved",
    "expert GB",
    "copies",
    "J/token",
)


_POLICIES: dict[str, Mapping[str, Any]] = {
    "batching": EVERY_BATCHING,
    "dispatch": DISPATCH,
    "retention": RETENTION,
    "scaling": SCALING,
}
"""Policies of each kind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulateConfig:
    """Config of `serving simulate`."""

    run: StudyRunConfig = StudyRunConfig()
    """Run directory and name."""
    preset: str = "qwen3_30b_a3b"
    """Model, by its name in jaxmoe.models.presets.PRESETS."""
    chip: str = "h100"
    """Device, by its name in jaxmoe.planning.hardware.CHIPS."""
    chips: int = 1
    """Devices of an instance, along the tensor axis."""
    instances: int = 1
    """Instances of the fleet."""
    batching: tuple[str, ...] = ()
    """Batching policies; all when empty."""
    dispatch: tuple[str, ...] = ("least_loaded",)
    """Dispatch policies; each is combined with each batching policy."""
    retention: tuple[str, ...] = ("lru",)
    """Retention policies: what becomes of the pages of preempted sequences."""
    scaling: tuple[str, ...] = ("fixed",)
    """Scaling policies: instances, devices and clocks over time."""
    workload: Workload = GammaConfig()
    """Requests; `rates` replaces its rate."""
    rates: tuple[float, ...] = (4.0, 8.0, 12.0)
    """Requests per second and instance."""
    pages: int | None = None
    """Pages of an instance; what its memory has room for when None."""
    ttft: float = 1.0
    """Promised seconds until the first token."""
    tpot: float = 0.05
    """Promised mean seconds per further token."""
    page_size: int = 16
    """Tokens of a page."""
    max_running: int = 256
    """Running sequences of an instance at most."""
    max_length: int = 20_000
    """Tokens of a sequence at most; longer ones are cut."""
    engine: FleetSizesConfig = FleetSizesConfig()
    """What is compiled and measured of a run, in place of preset, chip, chips and the sizes above;
    `batching` above names the policies."""
    cost: CostSource = "auto"
    """Time of a step: roofline of the chip, table of a run's compiled shapes, or rates fitted to
    it; auto takes the table on a CPU and the rates on other devices."""
    repeats: int = 5
    """Steps of each shape that are timed."""

    def __post_init__(self) -> None:
        members: dict[str, Mapping[str, Any]] = {
            "preset": PRESETS,
            "chip": CHIPS,
            **_POLICIES,
        }
        for field, names in members.items():
            value = getattr(self, field)
            for text in (value,) if isinstance(value, str) else value:
                name, _, settings = text.partition(":")
                if name in names and settings and field in _POLICIES:
                    policy(field, text)  # raises where it cannot be made
                elif name not in names or name != text:
                    near = closest(name, names)
                    listing = ", ".join(names)
                    raise ValueError(f"{field}={text} is unknown{near}; known: {listing}")
        chosen = {"rates": self.rates, "dispatch": self.dispatch}
        chosen |= {"retention": self.retention, "scaling": self.scaling}
        if self.pages is not None and self.pages < 1:
            raise ValueError(f"pages={self.pages} must be at least 1")
        if self.instances < 1 or not all(chosen.values()):
            raise ValueError(
                f"instances={self.instances} and {', '.join(f'{k}={v}' for k, v in chosen.items())}"
                " must name at least one each"
            )


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe serving simulate"
    config = cli.parse_flags(SimulateConfig(), argv, prog, __doc__ or "")
    started = time.perf_counter()
    with cli.exit_on_bad_configuration():
        directory = RunDirectory(config.run.directory or f"runs/serving/{config.run.name or 'sim'}")
        start_process(needs_devices=directory.has_config())
        require("matplotlib.figure")
        measured = None
        if directory.has_config():
            if config.pages is not None:
                raise ValueError(
                    f"pages={config.pages} are those of a preset, a run has engine.pages: leave"
                    " pages, or --run.directory"
                )
            if config.scaling != ("fixed",):
                raise ValueError(
                    f"scaling={config.scaling} changes devices and clocks, and the steps of a run"
                    " are measured with those of this machine: leave it, or --run.directory"
                )
            measured = measure_run(str(directory.path), config.engine, config.repeats, config.cost)
            say(measured.description)
            directory = RunDirectory(directory.path / "simulate")
        elif config.cost in ("table", "fit"):
            raise ValueError(
                f"cost={config.cost} is measured with the model of a run: set run.directory to one"
            )
        cost = measured.cost if measured else cost_of(config)
        facts = measured.facts if measured else facts_of(config, cost)
        description = describe(config, facts, measured and measured.name)
        rows = list(simulate(config, cost, facts, description))
        directory.plots_directory.mkdir(parents=True, exist_ok=True)
        picture = directory.plots_directory / "goodput.png"
        draw_goodput(picture, rows)
        table = [HEADINGS, *map(cells, rows)]
        write_report(directory.path / "report.html", description, table, rows)
        directory.write_summary(
            {
                "status": "done",
                "preset": None if measured else config.preset,
                "chip": None if measured else config.chip,
                "measured": measured and measured.summary,
                "pages": facts.num_pages,
                "rows": rows,
                "wall_seconds": time.perf_counter() - started,
            }
        )
        say(f"{text_table(table)}\n\n{picture}, {directory.path / 'report.html'}")
    return int(cli.ExitCode.DONE)


def cost_of(config: SimulateConfig) -> Roofline:
    """Return the cost model of one instance."""
    sizes = ModelSizes.of(PRESETS[config.preset]())
    return Roofline(sizes=sizes, chip=CHIPS[config.chip], num_chips=config.chips)


def facts_of(config: SimulateConfig, cost: Roofline) -> Facts:
    """Return the sizes of one instance."""
    num_pages = config.pages or cost.num_pages(config.page_size)
    return Facts(
        num_pages=num_pages,
        page_size=config.page_size,
        max_running=config.max_running,
        max_length=min(config.max_length, num_pages * config.page_size),
        num_layers=cost.sizes.num_layers,
        capabilities=frozenset({"pages", "partitions", "layers"}),
        cost=cost,
    )


def policy(kind: str, text: str) -> Any:
    """Return the config of a policy.

    Args:
        kind: batching, dispatch, retention or scaling.
        text: Its name, and `:FIELD=VALUE,...` for numbers that are not at their defaults.

    Raises:
        ValueError: A field is unknown, or a value cannot be read or is refused.
    """
    name, _, settings = text.partition(":")
    config = _POLICIES[kind][name]()
    defaults = {
        default_field.name: getattr(config, default_field.name)
        for default_field in dataclasses.fields(config)
    }
    fields = {
        k: default_field
        for k, default_field in defaults.items()
        if type(default_field) in (int, float)
    }
    values: dict[str, int | float] = {}
    for term in settings.split(",") if settings else ():
        field, _, value = term.partition("=")
        if field not in fields:
            near = closest(field, fields)
            raise ValueError(
                f"{kind}={text}: {field!r} is unknown{near}; known: {', '.join(fields) or 'none'}"
            )
        try:
            values[field] = type(fields[field])(value)
        except ValueError:
            raise ValueError(f"{kind}={text}: {value!r} is no number") from None
    return dataclasses.replace(config, **values)


def describe(config: SimulateConfig, facts: Facts, name: str | None = None) -> str:
    """Return a line on the model, the device and the workload."""
    where = f"{config.preset} on {config.instances} x {config.chips} {config.chip}"
    if name is not None:
        where = f"{config.instances} x {name}"
    elif spilled := cost_of(config).spill_share:
        where += f", {spilled:.0%} of the weights in host memory"
    return (
        f"{where}, {facts.num_pages} pages of"
        f" {facts.page_size} tokens each, workload {config.workload.name}, SLO {config.ttft} s and"
        f" {1000 * config.tpot:g} ms"
    )


def simulate(
    config: SimulateConfig, cost: Roofline, facts: Facts, description: str
) -> Iterator[dict[str, Any]]:
    """Yield the numbers of every policy at every rate.

    Args:
        config: Config of the command.
        cost: Cost model of one instance.
        facts: Its sizes.
        description: Line to print before.
    """
    say(description)
    objective = LatencyObjective(ttft=config.ttft, tpot=config.tpot)
    policies = config.batching or tuple(name for name in EVERY_BATCHING if _can_run(name, facts))
    chosen = (policies, config.dispatch, config.retention, config.scaling)
    for names in itertools.product(*chosen):  # refuses what does not fit before the first runs
        _simulation((), facts, names, cost, config.instances)
    for rate in config.rates:
        workload = dataclasses.replace(config.workload, rate=rate * config.instances)
        draw = functools.partial(workload.stream, objective, facts.max_length)
        for names in itertools.product(*chosen):
            shown = [n for n, all_ in zip(names[1:], chosen[1:], strict=True) if len(all_) > 1]
            measures = measure(_run(draw, facts, names, cost, config.instances))
            yield {
                "policy": " ".join((names[0], *shown)),
                "rate": workload.rate,
                **dataclasses.asdict(measures),
            }


def _run(
    draw: Callable[[], Iterable[Arrival]],
    facts: Facts,
    names: tuple[str, ...],
    cost: Roofline,
    instances: int,
) -> Simulation:
    """Return a simulation that has run, after one that measures where a policy asks for it."""

    def pilot() -> Mapping[Any, float]:
        fixed = (*names[:3], "fixed")
        return _simulation(draw(), facts, fixed, cost, instances).run().seconds_of_roles

    dispatch = policy("dispatch", names[1]).after_pilot(pilot)
    return _simulation(draw(), facts, names, cost, instances, dispatch).run()


def _simulation(
    arrivals: Iterable[Arrival],
    facts: Facts,
    names: tuple[str, ...],
    cost: Roofline,
    instances: int,
    dispatch: DispatchConfig | None = None,
) -> Simulation:
    """Return the simulation of named policies.

    Raises:
        ValueError: They do not fit one another or the number of instances.
    """
    return Simulation(
        arrivals,
        facts,
        policy("batching", names[0]),
        cost,
        num_instances=instances,
        dispatch=dispatch or policy("dispatch", names[1]),
        retention=policy("retention", names[2]),
        scaling=policy("scaling", names[3]),
    )


def _can_run(name: str, facts: Facts) -> bool:
    """Return whether the instances have what a batching policy needs."""
    with contextlib.suppress(ValueError):
        EVERY_BATCHING[name]().check(facts)
        return True
    return False


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of `simulate`, under `HEADINGS`."""

    def pair(values: Iterable[float], digits: int) -> str:
        return "/".join(f"{value:.{digits}f}" for value in values)

    return (
        row["policy"],
        f"{row['rate']:g}",
        f"{row['goodput']:.2f}",
        f"{row['within']:.1%}",
        pair((row["ttft_p50"], row["ttft_p99"]), 3),
        pair((1000 * row["tpot_p50"], 1000 * row["tpot_p99"]), 1),
        f"{row['tokens_per_second']:.0f}",
        str(row["preempted"]),
        str(row["cached"]),
        str(row["moves"]),
        _short(row["expert_bytes"] / 1e9),
        str(row["copies"]),
        _short(row["joules_per_token"]),
    )


def _short(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
