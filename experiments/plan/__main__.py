# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a recipe for devices that are not attached: mesh, memory, traffic and time of a step.

    python -m experiments.plan [recipe] --topology tpu:v5e:16x16 [--dotted.field value ...]

Every mesh of the devices and every number of micro-batches is estimated in closed form; the fastest
that fit are compiled ahead of time until one fits by the compiler too (TPUs: extra [plan]). With
--execution.mesh.AXIS only that mesh is planned, with --training.accumulation only that number. GPUs
are planned in closed form (--compiles 0). With --topology cpu:8 the plan also runs for a few steps,
and predictions are printed with their error. summary.json holds the figures and the flags for
pretrain. Exit codes: 0 planned, 2 bad configuration, or nothing fits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import write
from experiments.plan.config import (
    RECIPES,
    PlanConfig,
    names_accumulation,
    names_mesh,
    step_plan,
)
from experiments.plan.page import page_of_plan, page_of_refusal
from experiments.recipes import DEFAULT
from jaxmoe.configs import to_json
from jaxmoe.execution import ExecutionConfig
from jaxmoe.planning.compile_ahead import check_compiler, in_child
from jaxmoe.planning.hardware import Chip, Topology, parse_topology
from jaxmoe.planning.pipelines_compared import compare_schedules
from jaxmoe.planning.search import (
    Candidate,
    Found,
    enumerate_meshes,
    mesh_flags,
    mesh_in_words,
    remedies,
    search,
    search_with_stages,
)
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog, started = "python -m experiments.plan", time.perf_counter()
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, __doc__ or "")
    directory = RunDirectory(config.run.directory or f"runs/plan/{config.run.name or recipe}")
    with cli.exit_on_bad_configuration():
        topology = parse_topology(config.topology)
        if config.compiles:
            check_compiler(topology)
        directory.check_free_of_runs()
        with directory.held():
            found = find(
                config,
                topology,
                is_fixed=names_mesh(argv),
                searches_accumulation=not names_accumulation(argv),
            )
            summary, page = judge(config, topology, found)
            summary = {"recipe": recipe} | summary
            directory.write_environment([f"{topology.num_devices} x {topology.kind}, planned"])
            directory.write_summary(summary | {"wall_seconds": time.perf_counter() - started})
    write(page)
    if summary["status"] == "done":
        return int(cli.ExitCode.DONE)
    return int(cli.ExitCode.BAD_CONFIGURATION)


def find(
    config: PlanConfig, topology: Topology, *, is_fixed: bool, searches_accumulation: bool
) -> Found:
    """Return the fastest meshes that fit, in closed form.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        is_fixed: Whether to consider only the config's own mesh.
        searches_accumulation: Whether to consider every number of micro-batches. A batch that
            grows keeps the config's, which divides each of its sizes.

    Raises:
        ValueError: No mesh of the devices divides the model and the batch.
    """
    number, mesh = topology.num_devices, config.execution.mesh
    # A form of sequence parallelism lets the search choose seq, unless the recipe sets it.
    has_form = config.execution.sequence_parallel.name != "none"
    seq = None if has_form and mesh.seq == 1 else max(mesh.seq, 1)
    unfolded = dataclasses.replace(config.execution, mesh=MeshConfig(), fold=None)
    run = dataclasses.replace(config.pretrain, execution=unfolded)
    plan = step_plan(run, topology, MeshConfig())
    searches_accumulation = searches_accumulation and config.training.batch_ramp is None
    options: dict[str, Any] = {
        "keep": max(config.compiles, 1),
        "fold": config.execution.fold,
        "searches_accumulation": searches_accumulation,
    }
    if is_fixed:
        found = search(plan, [mesh.resolve(number)], topology.chip, **options)
        for reason in found.refused.values():
            raise ValueError(reason)
    elif mesh.stage > 1:
        meshes = list(enumerate_meshes(number, seq, [mesh.stage]))
        found = search(plan, meshes, topology.chip, **options)
    elif config.watch.gradients_every:  # needs all layers on one stage
        found = search(plan, list(enumerate_meshes(number, seq)), topology.chip, **options)
    else:
        found = search_with_stages(plan, number, topology.chip, seq=seq, **options)
    if not found.fitting and found.closest is None:
        examples = "\n  ".join(f"{mesh}: {why}" for mesh, why in list(found.refused.items())[-3:])
        raise ValueError(
            f"topology={topology.text}: none of the {found.num_meshes} meshes of {number} devices"
            f" divides this model and batch, such as\n  {examples}"
        )
    return found


def judge(config: PlanConfig, topology: Topology, found: Found) -> tuple[dict[str, Any], str]:
    """Return the summary and the page; compile until one mesh fits.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        found: Result of `find`.
    """
    about = {
        "topology": topology.text,
        "num_devices": topology.num_devices,
        "meshes": found.num_meshes,
        "meshes_refused": len(found.refused),
    }
    rejected: list[dict[str, Any]] = []
    for candidate in found.fitting:
        compiled = None
        if config.compiles:
            compiled = _compile(config, topology, candidate)
            if not _fits(compiled, topology):
                rejected.append({"mesh": _in_words(candidate), "compiled": compiled})
                continue
        summary = about | _summary(config, candidate, compiled, topology.chip)
        summary |= {"rejected": rejected}
        return summary, page_of_plan(topology, candidate, compiled, summary)
    closest = found.closest or found.fitting[0]
    ways = remedies(closest, topology.chip)
    summary = about | {
        "status": "nothing fits",
        "closest": mesh_in_words(closest.mesh),
        "needed": closest.memory.total,
        "available": topology.chip.available,
        "remedies": ways,
        "memory": closest.memory.categories(),
        "rejected": rejected,
    }
    return summary, page_of_refusal(topology, closest, ways, rejected)


def _in_words(candidate: Candidate) -> str:
    """Return the mesh and the number of micro-batches."""
    number = candidate.plan.accumulation
    return mesh_in_words(candidate.mesh) + (f", {number} micro-batches" if number > 1 else "")


def _compile(config: PlanConfig, topology: Topology, candidate: Candidate) -> dict[str, Any]:
    write(f"compiling {_in_words(candidate)} for {topology.text}, in another process")
    execution = dataclasses.replace(config.execution, mesh=candidate.mesh)
    training = dataclasses.replace(config.training, accumulation=candidate.plan.accumulation)
    planned = dataclasses.replace(config.pretrain, execution=execution, training=training)
    steps = config.measured_steps if topology.chip.platform == "cpu" else 0
    job = {"config": to_json(planned), "topology": topology.text, "steps": steps}
    result = in_child("experiments.plan.child", job, topology, on_wait=_say_phase)
    if "refused" in result:
        raise ValueError(result["refused"])
    return result


def _say_phase(seconds: float, phase: str) -> None:
    write(f"  {seconds:.0f} s: {phase}")


def _fits(compiled: dict[str, Any], topology: Topology) -> bool:
    return compiled["kind"] == "CompiledStep" and compiled["total"] <= topology.chip.available


def _choices(execution: ExecutionConfig) -> list[str]:
    """Return the choices that are not the defaults, as words of a command line."""
    usual = ExecutionConfig()
    words = [
        f"execution.{field}:{getattr(execution, field).name}"
        for field in ("dispatcher", "sequence_parallel", "pipeline")
        if type(getattr(execution, field)) is not type(getattr(usual, field))
    ]
    if execution.pipeline.chunks > 1:
        words += ["--execution.pipeline.chunks", str(execution.pipeline.chunks)]
    return words


def _batch_flags(config: PlanConfig, candidate: Candidate) -> list[str]:
    """Return the flags that make batches fit the mesh, where the config's do not."""
    flags, shards = [], candidate.mesh.batch_shards
    if candidate.plan.accumulation != config.training.accumulation:
        flags += ["--training.accumulation", str(candidate.plan.accumulation)]
    if config.held_out_batch_size % shards:
        rows = -(-config.held_out_batch_size // shards) * shards
        flags += ["--evaluation.batch_size", str(rows)]
    return flags


def _summary(
    config: PlanConfig, candidate: Candidate, compiled: dict[str, Any] | None, chip: Chip
) -> dict[str, Any]:
    execution = dataclasses.replace(config.execution, mesh=candidate.mesh)
    memory, seconds = candidate.memory, candidate.time
    return {
        "status": "done",
        "mesh": {axis: size for axis, size in candidate.mesh.by_axis.items() if size > 1},
        "accumulation": candidate.plan.accumulation,
        "flags": [*mesh_flags(candidate.mesh), *_batch_flags(config, candidate)]
        + _choices(execution),
        "execution": to_json(execution),
        "memory": memory.categories(),
        "arguments": memory.arguments,
        "temporaries": memory.temporaries,
        "total": memory.total,
        "available": chip.available,
        "step_seconds": seconds.step,
        "step_seconds_overlapped": seconds.overlapped,
        "compute_seconds": seconds.compute,
        "memory_seconds": seconds.memory,
        "communication_seconds": seconds.communication,
        "tokens_per_second": candidate.plan.tokens / seconds.step,
        "compiled": compiled,
        "schedules": _schedules(candidate, chip),
    }


def _schedules(candidate: Candidate, chip: Chip) -> list[dict[str, Any]]:
    """Return the figures of the schedules that fit a mesh with stages; none without stages."""
    if candidate.mesh.stage == 1:
        return []
    return [
        dataclasses.asdict(one) | {"pipeline": to_json(one.pipeline)}
        for one in compare_schedules(candidate.plan, chip)
    ]


if __name__ == "__main__":
    run_command(main)
