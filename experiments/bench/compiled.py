# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles one training step with this library and with MaxText, and compares (`bench compiled`).

Model, topology, batch, optimiser (AdamW), dtypes and remat are the same, parameters are sharded
over all devices, and no device is needed. MaxText's step is that of its own `train_compile`; its
Python may be another one (`--peer_python`), and `--python` gives this library the same compiler.

To add a model: a row of MODELS in `experiments/bench/compiled.py`.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any, Literal

from experiments.bench.step import BenchRunConfig
from experiments.cli.output import write
from experiments.cli.tables import text_table
from experiments.plan.units import size_in_words
from experiments.recipes import RECIPES
from jaxmoe.configs import to_json
from jaxmoe.planning.compile_ahead import check_compiler, in_child
from jaxmoe.planning.hardware import Topology, parse_topology
from sharding.mesh import MeshConfig

MODELS = {"qwen3_30b_a3b": "qwen3-30b-a3b", "mixtral_8x7b": "mixtral-8x7b"}
"""Names of MaxText by recipe."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledBenchConfig:
    """One training step, compiled by two libraries."""

    run: BenchRunConfig = BenchRunConfig()
    """Output directory."""
    recipe: str = "qwen3_30b_a3b"
    """Recipe of pretrain; MaxText has qwen3_30b_a3b and mixtral_8x7b."""
    topology: str = "tpu:v5e:16x16"
    """Devices, which need not be attached."""
    sequences: int = 1
    """Sequences on each device."""
    peer: Literal["maxtext", "none"] = "maxtext"
    """Library to compare with."""
    python: str = ""
    """Python that compiles this library's step; this one when empty."""
    peer_python: str = ""
    """Python that has MaxText; this one when empty."""

    def __post_init__(self):
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe={self.recipe} must be one of {', '.join(RECIPES)}")
        if self.sequences < 1:
            raise ValueError(f"sequences={self.sequences} must be at least 1")
        if self.peer == "maxtext" and self.recipe not in MODELS:
            raise ValueError(
                f"recipe={self.recipe} is no model of MaxText ({', '.join(MODELS)} are):"
                " set --peer none"
            )
        topology = parse_topology(self.topology)
        if self.peer == "maxtext" and topology.chip.platform != "tpu":
            raise ValueError(f"topology={self.topology} must be of TPUs for --peer maxtext")


def bench_compiled(config: CompiledBenchConfig) -> dict[str, Any]:
    """Return the figures of both compilers' programs.

    Args:
        config: Step to compile.

    Raises:
        ValueError: The step does not fit the topology, or MaxText is not installed.
    """
    topology = parse_topology(config.topology)
    check_compiler(topology)
    peer = config.peer_python or sys.executable
    if config.peer == "maxtext" and not _version(peer, "maxtext"):
        raise ValueError(
            f"peer_python={peer} has no MaxText: give a Python that has it, or --peer none"
        )
    found = {"jaxmoe": _ours(config, topology)}
    if config.peer == "maxtext":
        found["maxtext"] = _maxtext(config, topology)
    return {"topology": topology.text, "recipe": config.recipe, "programs": found}


def _ours(config: CompiledBenchConfig, topology: Topology) -> dict[str, Any]:
    number, python = topology.num_devices, config.python or sys.executable
    run = RECIPES[config.recipe]()
    execution = dataclasses.replace(run.execution, mesh=MeshConfig(data=number))
    training = dataclasses.replace(
        run.training, batch_size=number * config.sequences, accumulation=1
    )
    planned = dataclasses.replace(run, execution=execution, training=training)
    job = {"config": to_json(planned), "topology": topology.text, "steps": 0}
    result = in_child(
        "experiments.plan.child", job, topology, on_wait=_say("jaxmoe"), python=python
    )
    if result["kind"] != "CompiledStep":
        raise ValueError(f"topology={topology.text}: {result['text']}")
    return result | {"versions": _versions(python)}


def _maxtext(config: CompiledBenchConfig, topology: Topology) -> dict[str, Any]:
    run, python = RECIPES[config.recipe](), config.peer_python or sys.executable
    # MaxText counts the cores of a v5p, two on a chip.
    cores = topology.num_devices * (2 if topology.kind in ("v4", "v5p") else 1)
    words = {
        "run_name": "compiled",
        "compile_topology": f"{topology.kind}-{cores}",
        "compile_topology_num_slices": 1,
        "model_name": MODELS[config.recipe],
        "per_device_batch_size": config.sequences,
        "max_target_length": run.training.sequence_length,
        "ici_fsdp_parallelism": topology.num_devices,
        "remat_policy": run.execution.remat,
        "dataset_type": "synthetic",
        "enable_checkpointing": "false",
        "skip_jax_distributed_system": "true",
    }
    job = {"words": [f"{name}={value}" for name, value in words.items()]}
    result = in_child(
        "experiments.bench.maxtext_step",
        job,
        topology,
        on_wait=_say("maxtext"),
        python=python,
    )
    return result | {"versions": _versions(python)}


def _say(name: str):
    return lambda seconds, phase: write(f"  {name}, {seconds:.0f} s: {phase}")


def _version(python: str, package: str) -> str:
    """Return the version of a package under a Python; empty if it is not installed."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _versions(python: str) -> dict[str, str]:
    return {package: _version(python, package) for package in ("jax", "libtpu", "maxtext")}


def in_words(summary: dict[str, Any]) -> str:
    """Return the figures as a table, a column for each library.

    Args:
        summary: Result of `bench_compiled`.
    """
    programs = summary["programs"]
    rows = [("one device, one step", *programs)]

    def row(name: str, values: list[str]) -> None:
        rows.append((name, *values))

    each = list(programs.values())
    for package in ("jax", "libtpu"):
        row(package, [one["versions"][package] for one in each])
    for name in ("arguments", "temporaries", "peak", "bytes_accessed"):
        row(name.replace("_", " "), [_size(one[name]) for one in each])
    row("FLOPs, loops once", [f"{one['flops']:.4g}" if one["flops"] else "-" for one in each])
    kinds = sorted({line["kind"] for one in each for line in one["traffic"] or ()})
    for kind in kinds:
        for of, words in (("result_bytes", "results"), ("wire_bytes", "sent")):
            row(f"{kind}, {words}", [_size(_of_kind(one, kind, of)) for one in each])
    row("sent in all", [_size(_of_kind(one, None, "wire_bytes")) for one in each])
    row("compiled in", [f"{one['seconds']:.0f} s" for one in each])
    return f"{summary['recipe']} on {summary['topology']}\n{text_table(rows)}"


def _of_kind(program: dict[str, Any], kind: str | None, of: str) -> float | None:
    if program["traffic"] is None:
        return None
    return sum(line[of] for line in program["traffic"] if kind in (None, line["kind"]))


def _size(value: float | None) -> str:
    return "-" if value is None else size_in_words(value)
