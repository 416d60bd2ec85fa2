# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Advises on pages, batch, memory, several answers, stages and phases, with the deciding numbers.

    jaxmoe serving advise
    jaxmoe serving advise --preset mixtral_8x7b --chip h200 --chips 2
    jaxmoe serving advise --instances 4 --ttft 0.5 --tpot 0.03

By a roofline, nothing is run. The tables:

    attention   page size, batch and where a preempted request waits: for the model's own
                attention, a key head per query head, and latent attention in DeepSeek-V3's sizes
    answers     FLOPs, and bytes as FLOPs of equal time, of several answers (Kinetics)
    stages      cuts of the layers that no other beats in latency and throughput (ParetoPipe)
    phases      instances for prompts and for answers with the largest rate per instance within
                the SLO (DistServe), simulated with --instances

With --draft_scores, a file with a number on each line, the score below which a draft is rejected
so that at most --alpha of good ones are (ATTS). Writes summary.json.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.cli import flags as cli
from experiments.cli.output import say
from experiments.cli.process import start_process
from experiments.cli.tables import text_table
from experiments.serving.simulate import SimulateConfig, facts_of
from experiments.studies.study import StudyRunConfig
from jaxmoe.configs import closest
from jaxmoe.contrib.fleet.dispatch.dist_serve import DistServeConfig
from jaxmoe.contrib.serving_lab.simulation import (
    ModelSizes,
    Roofline,
    Simulation,
    Workload,
    measure,
)
from jaxmoe.contrib.serving_lab.simulation.advice import advise
from jaxmoe.contrib.serving_lab.simulation.search import Phases, pareto_cuts, place_phases
from jaxmoe.contrib.serving_lab.simulation.test_time import (
    AnswerCost,
    conformal_threshold,
    round_seconds,
)
from jaxmoe.contrib.serving_lab.simulation.workload import GammaConfig
from jaxmoe.layers.mixers import AttentionConfig, LatentAttentionConfig, MixerBase
from jaxmoe.models.presets import PRESETS
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.run.directory import RunDirectory
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.requests import LatencyObjective

Table = list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdviseConfig:
    """Config of `serving advise`."""

    run: StudyRunConfig = StudyRunConfig()
    """Run directory and name."""
    preset: str = "qwen3_30b_a3b"
    """Model, by its name in jaxmoe.models.presets.PRESETS."""
    chip: str = "h100"
    """Device, by its name in jaxmoe.planning.hardware.CHIPS."""
    chips: int = 1
    """Devices of an instance, along the tensor axis."""
    prompt: int = 1000
    """Tokens of a usual prompt."""
    answer: int = 300
    """Tokens of a usual answer."""
    answers: tuple[int, ...] = (1, 8, 64)
    """Answers to one question."""
    answer_length: int = 16_384
    """Tokens of each of these answers."""
    budget: int = 1024
    """Keys that a query of theirs sees, beside all."""
    draft_scores: str | None = None
    """File with a score per line, of drafts that ought to be accepted."""
    alpha: float = 0.1
    """Share of such drafts that may be rejected."""
    stages: int = 4
    """Devices in a pipeline, at most."""
    instances: int = 0
    """Instances to divide between prompts and answers; 0 skips the simulation."""
    workload: Workload = GammaConfig(requests=100)
    """Requests for that."""
    rates: tuple[float, float] = (0.5, 16.0)
    """Smallest and largest rate per instance for that."""
    ttft: float = 1.0
    """Promised seconds until the first token."""
    tpot: float = 0.05
    """Promised mean seconds per further token."""

    def __post_init__(self) -> None:
        for field, names in (("preset", PRESETS), ("chip", CHIPS)):
            if (name := getattr(self, field)) not in names:
                listing = ", ".join(names)
                raise ValueError(
                    f"{field}={name} is unknown{closest(name, names)}; known: {listing}"
                )
        for field in ("chips", "prompt", "answer", "answer_length", "budget", "stages"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if not self.answers or min(self.answers) < 1:
            raise ValueError(f"answers={self.answers} must be numbers of at least 1")
        if self.instances < 0 or self.instances == 1:
            raise ValueError(f"instances={self.instances} must be 0, or at least 2 for two phases")
        if not 0 < self.rates[0] < self.rates[1]:
            raise ValueError(f"rates={self.rates} must be above 0, the smaller first")
        if not 0 <= self.alpha < 1:
            raise ValueError(f"alpha={self.alpha} must lie in [0, 1)")


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe serving advise"
    config = cli.parse_flags(AdviseConfig(), argv, prog, __doc__ or "")
    started = time.perf_counter()
    with cli.exit_on_bad_configuration():
        start_process(needs_devices=False)
        name = config.run.name or "advise"
        directory = RunDirectory(config.run.directory or f"runs/serving/{name}")
        directory.check_free_of_runs()
        tables = dict(_tables(config))
        directory.write_summary(
            {"status": "done", "preset": config.preset, "chip": config.chip}
            | {"tables": tables, "wall_seconds": time.perf_counter() - started}
        )
    return int(cli.ExitCode.DONE)


def _tables(config: AdviseConfig) -> Iterator[tuple[str, Table]]:
    """Yield each table by its name, printed."""
    sizes = ModelSizes.of(PRESETS[config.preset]())
    cost = Roofline(sizes=sizes, chip=CHIPS[config.chip], num_chips=config.chips)
    say(
        f"{config.preset} on {config.chips} {config.chip}, {config.prompt} + {config.answer} tokens"
    )
    made = {
        "attention": attention_table,
        "answers": answers_table,
        "stages": stages_table,
        "drafts": drafts_table,
        "phases": phases_table,
    }
    for name, make in made.items():
        if len(table := make(config, cost)) > 1:
            say("\n" + text_table(table))
            yield name, table


def attention_table(config: AdviseConfig, cost: Roofline) -> Table:
    """Return the choices for each kind of attention."""
    mixer = PRESETS[config.preset]().attention
    heads = mixer.num_heads
    kinds: dict[str, MixerBase] = {
        "own": mixer,
        "multi-head": AttentionConfig(num_heads=heads, num_kv_heads=heads, head_dim=mixer.head_dim),
        "latent": LatentAttentionConfig(
            num_heads=heads, latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128
        ),
    }
    table: Table = [("attention", "choice", "", "decided by")]
    for name, kind in kinds.items():
        kind_cost = dataclasses.replace(cost, sizes=cost.sizes.attending(kind))
        for row in advise(kind_cost, config.prompt, config.answer):
            table.append((name, row.subject, row.choice, row.because))
    return table


def answers_table(config: AdviseConfig, cost: Roofline) -> Table:
    """Return what several long answers to one question cost."""
    costs = AnswerCost.of(cost.sizes)
    length = config.answer_length
    table: Table = [("answers", "keys", "TFLOP", "bytes as TFLOP", "total", "decided by")]
    for number in config.answers:
        totals = []
        for budget in (None, config.budget):
            arguments = (number, config.prompt, length, budget)
            flops = costs.flops(*arguments)
            moved = costs.bytes_as_flops(*arguments)
            totals.append(flops + moved)
            what = f"{moved / (flops + moved):.1%} of the cost is reading keys and values"
            if budget is not None:
                what = f"{totals[0] / totals[1]:.2f} times less than with all keys"
            keys = "all" if budget is None else str(budget)
            cells = (f"{value / 1e12:.4g}" for value in (flops, moved, flops + moved))
            table.append((str(number), keys, *cells, what))
    return table


def stages_table(config: AdviseConfig, cost: Roofline) -> Table:
    """Return the cuts of a prompt's layers that no other beats."""
    number = cost.sizes.num_layers
    sizes = cost.sizes
    parts = [[WorkPart(config.prompt, 0, (i, i + 1))] for i in range(number)]
    free = dataclasses.replace(cost, constant=0.0)
    # The head is an operation of every step: all layers but the last are timed beside a free one.
    headless = dataclasses.replace(free, sizes=dataclasses.replace(sizes, head=0))
    seconds = [headless.seconds(part) for part in parts[:-1]] + [free.seconds(parts[-1])]
    sent = 2 * config.prompt * sizes.embed_dim / cost.chip.link_bandwidth + cost.chip.link_latency
    cuts = pareto_cuts(seconds, [sent] * (number - 1), speeds=[1.0] * config.stages)
    table: Table = [("stages", "first layers", "latency ms", "prompts/s", "decided by")]
    for cut in cuts:
        borders = ", ".join(map(str, (0, *cut.borders)))
        row = (f"{1e3 * cut.latency:.3f}", f"{1 / cut.interval:.1f}")
        because = f"longest stage or transfer {1e3 * cut.interval:.3f} ms"
        table.append((str(len(cut.borders) + 1), borders, *row, because))
    return table


def drafts_table(config: AdviseConfig, cost: Roofline) -> Table:
    """Return the threshold for drafts, and what waiting for all of them costs."""
    del cost
    table: Table = [("drafts", "", "decided by")]
    if config.draft_scores is None:
        return table
    try:
        text = pathlib.Path(config.draft_scores).read_text(encoding="utf-8")
        scores = [float(line) for line in text.split()]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"draft_scores={config.draft_scores} cannot be read ({error}): name a file with a"
            " number on each line"
        ) from error
    threshold = conformal_threshold(scores, config.alpha)
    because = f"{len(scores)} scores; rejects at most {config.alpha:.1%} of their like"
    table.append(("reject below", f"{threshold:.6g}", because))
    most = max(config.answers)
    drafts = np.random.default_rng(0).lognormal(sigma=0.5, size=(10, most))
    together, alone = round_seconds(drafts, 0.1)
    because = f"{together / alone:.2f} times longer in step: 10 rounds of {most} lognormal drafts"
    table.append(("check", "when drafted" if alone < together else "in step", because))
    return table


def phases_table(config: AdviseConfig, cost: Roofline) -> Table:
    """Return the division of instances between phases, if it was asked for."""
    table: Table = [("phases", "choice", "decided by")]
    if not config.instances:
        return table
    best = best_phases(config, cost)
    slo = f"90% within {config.ttft:g} s and {1e3 * config.tpot:g} ms"
    if best is None:
        table.append(("none", f"of 2 to {config.instances} instances", f"no rate has {slo}"))
        return table
    choice = f"{best.prefill} for prompts, {best.decode} for answers"
    because = f"{best.rate:.2f} requests/s, {best.per_instance:.2f} per instance, {slo}"
    return [*table, ("instances", choice, because)]


def best_phases(config: AdviseConfig, cost: Roofline) -> Phases | None:
    """Return the division of at most `instances` that serves most per instance.

    Args:
        config: Config of the command.
        cost: Cost model of one instance.
    """
    objective = LatencyObjective(ttft=config.ttft, tpot=config.tpot)
    facts = facts_of(SimulateConfig(), cost)

    def within(prefill: int, decode: int, rate: float) -> float:
        workload = dataclasses.replace(config.workload, rate=rate)
        simulation = Simulation(
            workload.stream(objective, facts.max_length),
            facts,
            SplitFuseConfig(),
            cost,
            num_instances=prefill + decode,
            dispatch=DistServeConfig(prefill=prefill),
        )
        return measure(simulation.run()).within

    low, high = config.rates
    return place_phases(within, config.instances, low=low, high=high, tolerance=0.05)
