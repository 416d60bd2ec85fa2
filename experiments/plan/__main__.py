# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a recipe for devices that are not attached: mesh, memory, traffic and time of a step.

    python -m experiments.plan [recipe] --topology tpu:v5e:16x16 [--dotted.field value ...]

Every mesh of the devices, number of micro-batches, layout, dispatcher, fold, schedule and remat is
estimated in closed form; the fastest that fit are compiled ahead of time until one fits by the
compiler too (TPUs: extra [plan]). A choice that a flag sets is kept; with --execution.mesh.AXIS
only that mesh is planned, as the recipe has it. GPUs are planned in closed form (--compiles 0).
With --topology cpu:8 the plan also runs for a few steps, and predictions are printed with their
error. summary.json holds the figures and the flags for pretrain. Exit codes: 0 planned, 2 bad
configuration, or nothing fits.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from experiments.cli import flags as cli
from experiments.cli.exit import run_command
from experiments.cli.output import write
from experiments.plan.config import (
    RECIPES,
    PlanConfig,
    measured_topology,
    names_mesh,
    space_of,
    step_plan,
)
from experiments.plan.page import page_of_plan, page_of_refusal
from experiments.recipes import DEFAULT
from jaxmoe.configs import to_json
from jaxmoe.execution import ExecutionConfig, Remat
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.compile_ahead import check_compiler, in_child
from jaxmoe.planning.hardware import Chip, Topology, parse_topology
from jaxmoe.planning.pipelines_compared import compare_schedules
from jaxmoe.planning.search import (
    Candidate,
    Factors,
    Found,
    Space,
    enumerate_meshes,
    mesh_flags,
    mesh_in_words,
    remedies,
    search,
    stages_of,
)
from jaxmoe.planning.search.verdicts import plan_in_words, why_not
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog, started = "python -m experiments.plan", time.perf_counter()
    recipe, config = cli.parse(RECIPES, DEFAULT, argv, prog, __doc__ or "")
    directory = RunDirectory(config.run.directory or f"runs/plan/{config.run.name or recipe}")
    with cli.exit_on_bad_configuration():
        topology = measured_topology(config, parse_topology(config.topology))
        if config.compiles:
            check_compiler(topology)
        directory.check_free_of_runs()
        with directory.held():
            space = space_of(config, argv)
            searching = functools.partial(
                find, config, topology, is_fixed=names_mesh(argv), space=space
            )
            usual = RECIPES[recipe]().execution
            summary, page = judge(config, topology, searching, usual)
            summary = {"recipe": recipe} | summary
            directory.write_environment([f"{topology.num_devices} x {topology.kind}, planned"])
            directory.write_summary(summary | {"wall_seconds": time.perf_counter() - started})
    write(page)
    if summary["status"] == "done":
        return int(cli.ExitCode.DONE)
    return int(cli.ExitCode.BAD_CONFIGURATION)


def find(
    config: PlanConfig,
    topology: Topology,
    *,
    is_fixed: bool,
    space: Space,
    factors: Factors | None = None,
) -> Found:
    """Return the fastest plans that fit, in closed form.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        is_fixed: Whether to consider only the config's own mesh.
        space: Choices beside the mesh.
        factors: Compiled temporaries over those of the closed form, by remat.

    Raises:
        ValueError: No mesh of the devices divides the model and the batch.
    """
    number, mesh = topology.num_devices, config.execution.mesh
    unfolded = dataclasses.replace(config.execution, mesh=MeshConfig(), fold=None)
    run = dataclasses.replace(config.pretrain, execution=unfolded)
    plan = step_plan(run, topology, MeshConfig())
    found = None
    for meshes in [[mesh.resolve(number)]] if is_fixed else _tries(config, plan, topology):
        found = search(
            plan, meshes, topology.chip, fold=config.execution.fold, space=space, factors=factors
        )
        if found.fitting:
            break
    assert found is not None
    if is_fixed:
        for reason in found.refused.values():
            raise ValueError(reason)
    if not found.fitting and found.closest is None:
        examples = "\n  ".join(f"{mesh}: {why}" for mesh, why in list(found.refused.items())[-3:])
        raise ValueError(
            f"topology={topology.text}: none of the {found.num_meshes} meshes of {number} devices"
            f" divides this model and batch, such as\n  {examples}"
        )
    return found


def _tries(config: PlanConfig, plan: StepPlan, topology: Topology) -> list[list[MeshConfig]]:
    """Return the meshes to consider, then those to consider if none of them fits.

    Stages are tried where the devices span several networks, because a pipeline sends little
    between stages, and where nothing fits without.
    """
    number, chip, mesh = topology.num_devices, topology.chip, config.execution.mesh
    # A form of sequence parallelism lets the search choose seq.
    has_form = config.execution.sequence_parallel.name != "none"
    seq = None if has_form and mesh.seq == 1 else max(mesh.seq, 1)
    given = list(enumerate_meshes(number, seq, [mesh.stage]))
    if mesh.stage > 1 or config.watch.gradients_every:  # which needs all layers on one stage
        return [given]
    staged = [*given, *enumerate_meshes(number, seq, stages_of(plan, number))]
    return [staged] if chip.domain and number > chip.domain else [given, staged]


def judge(
    config: PlanConfig,
    topology: Topology,
    searching: Callable[..., Found],
    usual: ExecutionConfig,
) -> tuple[dict[str, Any], str]:
    """Return the summary and the page; compile until one plan fits.

    What the compiler finds for a plan that does not fit corrects the closed form of those with the
    same remat, and the search is repeated.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        searching: `find` for given factors.
        usual: Execution of the recipe, whose flags need not be given.
    """
    found, factors = searching(), dict[Remat, float]()
    rejected: list[dict[str, Any]] = []

    def about() -> dict[str, Any]:
        return {
            "topology": topology.text,
            "num_devices": topology.num_devices,
            "meshes": found.num_meshes,
            "meshes_refused": len(found.refused),
            "arrangements": found.num_arrangements,
            "rejected": rejected,
        }

    for _ in range(max(config.compiles, 1)):
        if not found.fitting:
            break
        candidate, compiled = found.fitting[0], None
        if config.compiles:
            compiled = _compile(config, topology, candidate)
            if not _fits(compiled, topology):
                rejected.append({"plan": plan_in_words(candidate.plan), "compiled": compiled})
                factors[candidate.plan.execution.remat] = _factor(candidate, compiled, topology)
                found = searching(factors=factors)
                continue
        summary = about() | _summary(config, found, compiled, topology.chip, usual)
        return summary, page_of_plan(topology, found, compiled, summary)
    closest = found.closest or found.fitting[0]
    ways = remedies(closest, topology.chip)
    summary = about() | {
        "status": "nothing fits",
        "closest": mesh_in_words(closest.mesh),
        "needed": closest.need,
        "available": topology.chip.available,
        "remedies": ways,
        "memory": closest.memory.categories(),
    }
    return summary, page_of_refusal(topology, closest, ways, rejected)


def _factor(candidate: Candidate, compiled: dict[str, Any], topology: Topology) -> float:
    """Return compiled temporaries over those of the closed form, enough to refuse the plan."""
    memory = candidate.memory
    needed = compiled.get("total") or compiled.get("needed") or 0.0
    needed = max(needed, topology.chip.available * 1.01)
    return (needed - memory.arguments) / memory.temporaries


def _compile(config: PlanConfig, topology: Topology, candidate: Candidate) -> dict[str, Any]:
    words = plan_in_words(candidate.plan)
    write(f"compiling {words} for {topology.text}, in another process")
    execution = _chosen(config, candidate)
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


def _chosen(config: PlanConfig, candidate: Candidate) -> ExecutionConfig:
    """Return the execution of a run that follows a plan."""
    own = candidate.plan.execution
    names = ("mesh", "fold", "rules", "dispatcher", "pipeline", "remat")
    return dataclasses.replace(config.execution, **{name: getattr(own, name) for name in names})


def _choices(execution: ExecutionConfig, usual: ExecutionConfig) -> list[str]:
    """Return the choices that are not the recipe's, as words of a command line."""
    words = [
        word
        for field in ("rules", "remat")
        if getattr(execution, field) != getattr(usual, field)
        for word in (f"--execution.{field}", getattr(execution, field))
    ]
    if execution.fold is not None and execution.fold != usual.fold:
        words.append("execution.fold:moe-mesh")
        words += [
            word
            for name, size in dataclasses.asdict(execution.fold).items()
            if size > 1
            for word in (f"--execution.fold.{name}", str(size))
        ]
    words += [
        f"execution.{field}:{getattr(execution, field).name}"
        for field in ("dispatcher", "sequence_parallel", "pipeline")
        if type(getattr(execution, field)) is not type(getattr(usual, field))
    ]
    if execution.pipeline.chunks != usual.pipeline.chunks:
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
    config: PlanConfig,
    found: Found,
    compiled: dict[str, Any] | None,
    chip: Chip,
    usual: ExecutionConfig,
) -> dict[str, Any]:
    candidate = found.fitting[0]
    execution = _chosen(config, candidate)
    memory, seconds = candidate.memory, candidate.time
    return {
        "status": "done",
        "mesh": {axis: size for axis, size in candidate.mesh.by_axis.items() if size > 1},
        "accumulation": candidate.plan.accumulation,
        "flags": [*mesh_flags(candidate.mesh), *_batch_flags(config, candidate)]
        + _choices(execution, usual),
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
        "runners_up": [
            {
                "plan": plan_in_words(one.plan),
                "step_seconds": one.time.step,
                "total": one.need,
                "why": why_not(candidate, one),
            }
            for one in found.fitting[1:]
        ],
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
