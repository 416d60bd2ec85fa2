# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Measures the speed of training steps, LoRA, serving, kernels, routers and expert exchanges.

    jaxmoe bench step [--peer none]
    jaxmoe bench finetune
    jaxmoe bench serve
    jaxmoe bench idle [--batches 1 32 128]
    jaxmoe bench kernels
    jaxmoe bench routers [--methods mixtral ...]
    jaxmoe bench chunks [--expert 8]
    jaxmoe bench compiled [--recipe mixtral_8x7b --topology tpu:v5p:4x4x4]
    jaxmoe bench growth [--curves files resume]
    jaxmoe bench accelerator [--minutes 8] [--parts step attention] [--list]

Candidates take turns in one run, medians are compared, and the measured limit of the machine is
shown beside them. Keep the machine idle otherwise: load changes even the ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from experiments.bench import chunks as bench_chunks
from experiments.bench import compiled as bench_compiled
from experiments.bench import finetune as bench_finetune
from experiments.bench import growth as bench_growth
from experiments.bench import kernels as bench_kernels
from experiments.bench import routers as bench_routers
from experiments.bench import serve as bench_serve
from experiments.bench import step as bench_step
from experiments.bench.accelerator import command as bench_accelerator
from experiments.bench.accelerator.command import AcceleratorBenchConfig
from experiments.bench.chunks import ChunkBenchConfig
from experiments.bench.compiled import CompiledBenchConfig
from experiments.bench.finetune import FinetuneBenchConfig
from experiments.bench.growth import GrowthBenchConfig
from experiments.bench.kernels import KernelBenchConfig
from experiments.bench.measure import OtherLoad, describe_load
from experiments.bench.routers import RouterBenchConfig
from experiments.bench.serve import ServeBenchConfig
from experiments.bench.serving import idle as bench_idle
from experiments.bench.serving.idle import IdleBenchConfig
from experiments.bench.step import StepBenchConfig
from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import say
from experiments.cli.process import start_process
from jaxmoe.run.directory import RunDirectory


def step() -> StepBenchConfig:
    """Training step of OLMoE's shape, compared with transformers; two minutes."""
    return StepBenchConfig()


def finetune() -> FinetuneBenchConfig:
    """LoRA fine-tuning of OLMoE's shape, compared with peft; two minutes."""
    return FinetuneBenchConfig()


def serve() -> ServeBenchConfig:
    """Greedy answers of OLMoE's shape, compared with transformers; three minutes."""
    return ServeBenchConfig()


def idle() -> IdleBenchConfig:
    """Time in which the device waits for the host between steps of the engine; two minutes."""
    return IdleBenchConfig()


def kernels() -> KernelBenchConfig:
    """Products and attention, compared with dense products and libraries; six minutes."""
    return KernelBenchConfig()


def routers() -> RouterBenchConfig:
    """Every routing method, compared with plain top-k: 16384 tokens, 8 of 64 experts; minutes."""
    return RouterBenchConfig()


def chunks() -> ChunkBenchConfig:
    """Operations of a MoE layer with experts on all devices; two minutes."""
    return ChunkBenchConfig()


def compiled() -> CompiledBenchConfig:
    """Training step compiled for a pod that is not attached, beside MaxText's; ten minutes."""
    return CompiledBenchConfig()


def accelerator() -> AcceleratorBenchConfig:
    """Everything on one accelerator: is it right, how fast, beside whom; eight minutes."""
    return AcceleratorBenchConfig()


def growth() -> GrowthBenchConfig:
    """Growth of costs with data, steps, requests and devices; six minutes."""
    return GrowthBenchConfig()


class Bench(NamedTuple):
    """One benchmark of the command."""

    recipe: Callable[[], Any]
    """Function that returns its config; its docstring is the help text."""
    measure: Callable[[Any], dict[str, Any]]
    """Measures, and returns the numbers of summary.json."""
    in_words: Callable[[dict[str, Any]], str]
    """Returns the numbers as a table."""
    holds_devices: bool = True
    """Whether it computes in this process, and not in others that need the devices."""


BENCHES: dict[str, Bench] = {
    "step": Bench(step, bench_step.bench_step, bench_step.in_words),
    "finetune": Bench(finetune, bench_finetune.bench_finetune, bench_finetune.in_words),
    "serve": Bench(serve, bench_serve.bench_serve, bench_serve.in_words),
    "idle": Bench(idle, bench_idle.bench_idle, bench_idle.in_words),
    "kernels": Bench(kernels, bench_kernels.bench_kernels, bench_kernels.in_words),
    "routers": Bench(routers, bench_routers.bench_routers, bench_routers.in_words),
    "chunks": Bench(chunks, bench_chunks.bench_chunks, bench_chunks.in_words),
    "compiled": Bench(compiled, bench_compiled.bench_compiled, bench_compiled.in_words),
    "growth": Bench(growth, bench_growth.bench_growth, bench_growth.in_words, holds_devices=False),
    "accelerator": Bench(
        accelerator,
        bench_accelerator.bench_accelerator,
        bench_accelerator.in_words,
        holds_devices=False,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    if list(argv) == ["accelerator", "--list"]:
        say(bench_accelerator.parts_in_words())
        return int(cli.ExitCode.DONE)
    recipes = {name: bench.recipe for name, bench in BENCHES.items()}
    name, config = cli.parse(recipes, "step", argv, "jaxmoe bench", __doc__ or "")
    bench = BENCHES[name]
    with cli.exit_on_bad_configuration():
        start_process(needs_devices=bench.holds_devices)
    directory = RunDirectory(config.run.directory or f"runs/bench/{name}")
    load = OtherLoad()
    with cli.exit_on_bad_configuration():
        directory.check_free_of_runs()
        say(f"bench {name}: {(bench.recipe.__doc__ or '').strip()}\ncompiling and measuring ...")
        summary = bench.measure(config)
        share = load.share()
        text = f"{bench.in_words(summary)}\n{describe_load(share)}"
        devices = jax.devices() if bench.holds_devices else []
        directory.write_environment([str(device) for device in devices])
        directory.write_summary({"status": "done", "bench": name, "other_load": share, **summary})
    say(text)
    return int(cli.ExitCode.DONE)


if __name__ == "__main__":
    run_command(main)
