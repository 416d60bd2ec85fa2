# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Replays the experts that a run uses on caches of some of them, beside Belady's bound.

    jaxmoe serving caches --run.directory runs/pretrain/tiny --capacity 0.25 0.5
    jaxmoe serving caches --trace runs/routers/short/traces/mixtral.npz \\
        --expert_parameters 100000
    jaxmoe serving caches --run.directory runs/pretrain/tiny \\
        --category.quota 0.2 --category.terms 0:quota=0.05,lifetime=4

A device holds a share of all experts of a model, the others lie in host memory. Each step meets
`tokens` tokens. Prints a line per policy and capacity:

    hits       uses that found their expert
    GB         bytes loaded, those ahead of their use included
    wait s     seconds that uses waited for their expert; loads ahead of a use cost none
    of bound   loads over those of belady, which knows the future: at least 1

and how long the experts of a step take if the host computes some of those that are missing.
Writes caches/summary.json and plots/caches.png into the run; without a run, into runs/serving.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.evaluate import FinishedRunConfig
from experiments.serving.picture import draw_caches
from jaxmoe.configs import closest
from jaxmoe.contrib.serving_lab.caches import (
    ITEM_CACHES,
    CategoryConfig,
    Replayed,
    Use,
    expert_uses,
    replay,
)
from jaxmoe.contrib.serving_lab.caches.hybrid_split import SplitCosts, split_experts
from jaxmoe.contrib.serving_lab.simulation import ModelSizes
from jaxmoe.optional import require
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.routing.telemetry.trace import RoutingTrace, load_trace
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.load import load_run
from jaxmoe.run.measures import record_run

HEADINGS = ("policy", "capacity", "hits", "GB", "wait s", "of bound")
_WEIGHT_BYTES = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CachesConfig:
    """Config of `serving caches`."""

    run: FinishedRunConfig = FinishedRunConfig()
    """Run with the experts."""
    trace: str | None = None
    """Recorded trace, in place of a run."""
    expert_parameters: int | None = None
    """Parameters of an expert; those of the run when None."""
    capacity: tuple[float, ...] = (0.25, 0.5)
    """Shares of all experts that the device holds."""
    tokens: int = 8
    """Tokens of a step."""
    most_tokens: int = 2048
    """Tokens of the trace that are replayed."""
    chip: str = "h100"
    """Device, by its name in jaxmoe.planning.hardware.CHIPS; its host memory holds all experts."""
    latency: float = 1e-5
    """Seconds of every transfer beside its bytes; an assumption."""
    host_flops: float = 2e12
    """FLOP/s of the host's processors; an assumption."""
    host_bandwidth: float = 200e9
    """Bytes per second of the host's memory; an assumption."""
    category: CategoryConfig = CategoryConfig()
    """Policy `category`; the category of an expert is the number of its layer, from 0, and the
    time of a step its number."""

    def __post_init__(self) -> None:
        if not self.capacity or not all(0 < share <= 1 for share in self.capacity):
            raise ValueError(f"capacity={self.capacity} must be shares above 0, at most 1")
        for field in ("tokens", "most_tokens", "expert_parameters"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field}={value} must be at least 1")
        for field in ("host_flops", "host_bandwidth"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field}={getattr(self, field)} must be above 0")
        if self.latency < 0:
            raise ValueError(f"latency={self.latency} must be 0 or more seconds")
        if self.chip not in CHIPS:
            near = closest(self.chip, CHIPS)
            listing = ", ".join(CHIPS)
            raise ValueError(f"chip={self.chip} is unknown{near}; known: {listing}")
        if self.trace is not None and self.expert_parameters is None:
            raise ValueError(
                "expert_parameters is not known of a trace alone: set it, or name a run"
            )


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe serving caches"
    config = cli.parse_flags(CachesConfig(), argv, prog, __doc__ or "")
    started = time.perf_counter()
    with cli.exit_on_bad_configuration():
        start_process(needs_devices=config.trace is None)
        require("matplotlib.figure")
        trace, parameters, target = _open(config)
        trace = trace.part(0, config.most_tokens)
        rows = list(caches(trace, parameters, config))
        splits = [row.pop("split") for row in rows if row["policy"] == "lru"]
        say(
            f"{trace.num_layers} layers of {trace.num_experts} experts, {parameters:,} parameters"
            f" each; {trace.num_tokens} tokens, {config.tokens} a step; {config.chip}"
        )
        say(text_table([HEADINGS, *map(cells, rows)]))
        say("\n".join(map(_split_line, splits)))
        plots = target.plots_directory
        plots.mkdir(parents=True, exist_ok=True)
        draw_caches(plots / "caches.png", rows)
        RunDirectory(target.path / "caches").write_summary(
            {"status": "done", "experts": trace.num_experts, "layers": trace.num_layers}
            | {"expert_parameters": parameters, "tokens": trace.num_tokens, "chip": config.chip}
            | {"rows": rows, "splits": splits, "wall_seconds": time.perf_counter() - started}
        )
        say(f"\n{plots / 'caches.png'}, {target.path / 'caches' / 'summary.json'}")
    return int(cli.ExitCode.DONE)


def _open(config: CachesConfig) -> tuple[RoutingTrace, int, RunDirectory]:
    """Return the trace, the parameters of an expert, and where files are written."""
    if config.trace is not None:
        assert config.expert_parameters is not None  # checked by the config
        return load_trace(config.trace), config.expert_parameters, RunDirectory("runs/serving")
    run_config = config.run
    assembly, state, _ = load_run(
        run_config.directory, run_config.step, run_config.mesh, initial=run_config.initial
    )
    trace = record_run(assembly, state)
    parameters = config.expert_parameters or ModelSizes.of(assembly.plan.model).expert
    return trace, parameters, RunDirectory(run_config.directory)


def caches(trace: RoutingTrace, parameters: int, config: CachesConfig) -> Iterator[dict[str, Any]]:
    """Yield the numbers of every policy at every capacity; those of `lru` with a split.

    Args:
        trace: Experts of every token.
        parameters: Parameters of an expert.
        config: Config of the command.
    """
    size = float(parameters * _WEIGHT_BYTES)
    uses = expert_uses(trace, config.tokens, size)
    bandwidth = CHIPS[config.chip].host_bandwidth
    for share in config.capacity:
        capacity = int(share * trace.num_layers * trace.num_experts) * size
        policies = {name: policy() for name, policy in ITEM_CACHES.items()} | {
            "category": config.category
        }
        replays = {name: replay(uses, policy, capacity) for name, policy in policies.items()}
        bound = max(replays["belady"].loads, 1)
        for name, policy in replays.items():
            seconds = policy.seconds(bandwidth, config.latency)
            row = {"policy": name, "capacity": share, "hit_rate": policy.hit_rate}
            row |= {"loads": policy.loads, "bytes": policy.bytes_loaded, "seconds": seconds}
            row["over_bound"] = policy.loads / bound
            if name == "lru":
                each = config.tokens * trace.expert_ids.shape[2]
                row["split"] = {"capacity": share} | seconds_by_place(
                    uses, policy, each, _costs(parameters, config)
                )
            yield row


def seconds_by_place(
    uses: Sequence[Use], replayed: Replayed, assignments: int, costs: SplitCosts
) -> dict[str, float]:
    """Return the mean seconds of a layer of a step, by who computes its experts.

    Args:
        uses: Uses of experts.
        replayed: Which of them the accelerator held.
        assignments: Pairs of token and expert of a step.
        costs: Rates of host and accelerator.
    """
    splits = []
    loads = {}
    experts = set()
    scores: Mapping[Any, float] = {}
    for use, is_hit in [*zip(uses, replayed.hits, strict=True), (None, False)]:
        if loads and (use is None or use.scores):
            splits.append(split_experts(loads, experts, costs))
            loads = {}
            experts = set()
        if use is not None:
            scores = use.scores or scores
            loads[use.item] = max(round(scores[use.item] * assignments), 1)
            experts |= {use.item} if is_hit else set()
    return {
        name: statistics.fmean(getattr(split, name) for split in splits)
        for name in ("seconds", "accelerator_alone", "host_alone")
    }


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row of `caches`, under `HEADINGS`."""
    return (
        row["policy"],
        f"{row['capacity']:g}",
        f"{row['hit_rate']:.1%}",
        f"{row['bytes'] / 1e9:.3g}",
        f"{row['seconds']:.3g}",
        f"{row['over_bound']:.2f}",
    )


def _costs(parameters: int, config: CachesConfig) -> SplitCosts:
    chip = CHIPS[config.chip]
    return SplitCosts(
        parameters=parameters,
        flops=chip.flops * chip.efficiency,
        bandwidth=chip.memory_bandwidth,
        host_flops=config.host_flops,
        host_bandwidth=config.host_bandwidth,
        link_bandwidth=chip.host_bandwidth,
        weight_bytes=_WEIGHT_BYTES,
    )


def _split_line(split: Mapping[str, float]) -> str:
    return (
        f"experts of a layer at capacity {split['capacity']:g} with lru:"
        f" {1e6 * split['seconds']:.1f} us divided between host and device,"
        f" {1e6 * split['accelerator_alone']:.1f} us on the device,"
        f" {1e6 * split['host_alone']:.1f} us on the host"
    )
