# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Compiles one training step with this library and with MaxText, and compares (`bench compiled`).

Model, topology, batch, optimiser (AdamW), dtypes and remat are the same, parameters are sharded
over all devices, and no device is needed. MaxText's step is that of its own `train_compile`; its
Python may be another one (`--peer_python`), and `--python` gives this library the same compiler.

    pip install "maxtext[tpu]==0.2.5" jax==0.11.2 jaxlib==0.11.2      in a venv of Python 3.12
    jaxmoe bench compiled --python VENV/bin/python --peer_python VENV/bin/python

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
from jaxmoe.execution import Remat
from jaxmoe.planning.compile_ahead import CompilerRefusal, in_child
from jaxmoe.planning.compilers.topologies import check_compiler
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
    expert: int = 1
    """Size of mesh.expert in this library's mesh, whose other axis is data: whole experts are
    stored over the one, the width of each over the other."""
    remat: Remat | None = None
    """What this library computes again; None for full, as MaxText does."""
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
        topology = parse_topology(self.topology)
        number = topology.num_devices
        if self.expert < 1 or number % self.expert:
            raise ValueError(f"expert={self.expert} must divide the {number} devices of topology")
        if self.peer == "maxtext" and self.recipe not in MODELS:
            raise ValueError(
                f"recipe={self.recipe} is no model of MaxText ({', '.join(MODELS)} are):"
                " set --peer none"
            )
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
    if not config.python:
        check_compiler(topology)
    elif topology.chip.platform == "tpu" and not _version("python", config.python, "libtpu"):
        raise ValueError(f"python={config.python} has no libtpu: pip install libtpu there")
    peer = config.peer_python or sys.executable
    if config.peer == "maxtext":
        for package in ("maxtext", "libtpu"):
            if not _version("peer_python", peer, package):
                raise ValueError(
                    f"peer_python={peer} has no {package}: give a Python that has MaxText and"
                    " libtpu, or --peer none"
                )
    results = {"jaxmoe": _ours(config, topology)}
    if config.peer == "maxtext":
        results["maxtext"] = _maxtext(config, topology)
    return {"topology": topology.text, "recipe": config.recipe, "programs": results}


def _ours(config: CompiledBenchConfig, topology: Topology) -> dict[str, Any]:
    number = topology.num_devices
    python = config.python or sys.executable
    run = RECIPES[config.recipe]()
    remat = config.remat or "full"
    mesh = MeshConfig(data=number // config.expert, expert=config.expert)
    execution = dataclasses.replace(run.execution, mesh=mesh, remat=remat)
    training = dataclasses.replace(
        run.training, batch_size=number * config.sequences, accumulation=1
    )
    planned = dataclasses.replace(run, execution=execution, training=training)
    job = {"config": to_json(planned), "topology": topology.text, "steps": 0}
    result = in_child(
        "experiments.plan.child", job, topology, on_wait=_say("jaxmoe"), python=python
    )
    return _of(result, "python", python)


def _maxtext(config: CompiledBenchConfig, topology: Topology) -> dict[str, Any]:
    run = RECIPES[config.recipe]()
    python = config.peer_python or sys.executable
    # MaxText counts the cores of a v5p, two on a chip.
    cores = topology.num_devices * (2 if topology.kind in ("v4", "v5p") else 1)
    settings = {
        "run_name": "compiled",
        "compile_topology": f"{topology.kind}-{cores}",
        "compile_topology_num_slices": 1,
        "model_name": MODELS[config.recipe],
        "per_device_batch_size": config.sequences,
        "max_target_length": run.training.sequence_length,
        "ici_fsdp_parallelism": topology.num_devices,
        "remat_policy": "full",
        "dataset_type": "synthetic",
        "enable_checkpointing": "false",
        "skip_jax_distributed_system": "true",
    }
    job = {
        "words": [f"{name}={value}" for name, value in settings.items()],
        "shape": "x".join(map(str, topology.shape)),
    }
    try:
        result = in_child(
            "experiments.bench.maxtext_step",
            job,
            topology,
            on_wait=_say("maxtext"),
            python=python,
        )
    except RuntimeError as error:
        raise ValueError(
            f"peer_python={python}: MaxText's step was not compiled: {error}"
        ) from error
    return _of(result, "peer_python", python) | {"words": job["words"]}


def _of(result: dict[str, Any], field: str, python: str) -> dict[str, Any]:
    """Return the record of a child process, with versions.

    Args:
        result: The record.
        field: Field of the config that names the Python.
        python: The Python.

    Raises:
        ValueError: The child or the compiler refused the job.
    """
    if "refused" in result:
        raise ValueError(result["refused"])
    if result.get("kind") == CompilerRefusal.__name__:
        raise ValueError(f"{field}: {result['text']}")
    packages = ("jax", "libtpu", "maxtext")
    return result | {"versions": {name: _version(field, python, name) for name in packages}}


def _say(name: str):
    return lambda seconds, phase: write(f"  {name}, {seconds:.0f} s: {phase}")


def _version(field: str, python: str, package: str) -> str:
    """Return the version of a package under a Python; empty if it is not installed."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{field}={python} is no Python that can be run: {error}") from error
    return done.stdout.strip() if done.returncode == 0 else ""


_MEMORY = {
    "arguments": "arguments",
    "allocated": "allocated in all",
    "peak": "alive at the peak",
    "temporaries": "temporaries (XLA's figure)",
}


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
        row(package, [result["versions"][package] for result in each])
    row(
        "compiled in",
        [f"{result['seconds']:.0f} s" if "seconds" in result else "-" for result in each],
    )
    if any("needed" in result for result in each):
        row("does not fit, needs", [_size(result.get("needed")) for result in each])
    for name, label in _MEMORY.items():
        row(label, [_size(result.get(name)) for result in each])
    works = [result.get("work") or {} for result in each]
    row("bytes accessed, loops counted", [_size(result.get("bytes_accessed")) for result in works])
    row(
        "FLOPs of products, loops counted",
        [_number(result.get("product_flops")) for result in works],
    )
    row("FLOPs of kernels, by estimate", [_number(result.get("kernel_flops")) for result in works])
    row("kernels without an estimate", [str(result.get("unestimated", "-")) for result in works])
    row("bytes accessed, loops once", [_size(result.get("bytes_accessed")) for result in each])
    row("FLOPs, loops once", [_number(result.get("flops")) for result in each])
    kinds = sorted({line["kind"] for result in each for line in result.get("traffic") or ()})
    for kind in kinds:
        for of, label in (("result_bytes", "results"), ("wire_bytes", "sent")):
            row(f"{kind}, {label}", [_size(_of_kind(result, kind, of)) for result in each])
    row("sent in all", [_size(_of_kind(result, None, "wire_bytes")) for result in each])
    return f"{summary['recipe']} on {summary['topology']}\n{text_table(rows)}"


def _of_kind(program: dict[str, Any], kind: str | None, of: str) -> float | None:
    if program.get("traffic") is None:
        return None
    return sum(line[of] for line in program["traffic"] if kind in (None, line["kind"]))


def _number(value: float | None) -> str:
    return f"{value:.4g}" if value else "-"


def _size(value: float | None) -> str:
    return "-" if value is None else size_in_words(value)
