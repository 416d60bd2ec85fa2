# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Plans a recipe for devices that are not attached: mesh, memory, traffic and time of a step.

    jaxmoe plan [recipe] --topology tpu:v5e:16x16 [--dotted.field value ...]

Every mesh of the devices, number of micro-batches, layout, dispatcher, fold, schedule and remat is
estimated in closed form; the fastest that fit are compiled ahead of time until one fits by the
compiler too (TPUs: extra [plan]; NVIDIA's H100, H200 and A100: extra [cuda]; --compiles 0 compiles
nothing). A choice that a flag sets is kept; with --execution.mesh.AXIS only that mesh is planned,
as the recipe has it. For a GPU the kernels of the compiled step are listed by kind, with the bytes
that they move, and predict the step. With --topology cpu:8 the plan also runs for a few steps, and
predictions are printed with their error. summary.json holds the figures and the flags for pretrain.
Exit codes: 0 planned, 2 bad configuration, or nothing fits.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection, Sequence

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
from experiments.plan.judge import judge
from experiments.recipes import DEFAULT
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.compilers.topologies import check_compiler
from jaxmoe.planning.hardware import Topology, parse_topology
from jaxmoe.planning.search import (
    Factors,
    SearchResult,
    Space,
    enumerate_meshes,
    search,
    stages_of,
)
from jaxmoe.run.directory import RunDirectory
from sharding.mesh import MeshConfig


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    prog = "jaxmoe plan"
    started = time.perf_counter()
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
            default_execution = RECIPES[recipe]().execution
            summary, page = judge(config, topology, searching, default_execution)
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
    without: Collection[str] = (),
) -> SearchResult:
    """Return the fastest plans that fit, in closed form.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        is_fixed: Whether to consider only the config's own mesh.
        space: Choices beside the mesh.
        factors: Compiled temporaries over those of the closed form, by remat.
        without: Names of dispatchers to leave out, if the search has others.

    Raises:
        ValueError: No mesh of the devices divides the model and the batch.
    """
    number = topology.num_devices
    mesh = config.execution.mesh
    dispatchers = tuple(
        dispatcher for dispatcher in space.dispatchers if dispatcher.name not in without
    )
    space = dataclasses.replace(space, dispatchers=dispatchers or space.dispatchers)
    unchosen = dataclasses.replace(config.execution, mesh=MeshConfig(data=-1), fold=None)
    run = dataclasses.replace(config.pretrain, execution=unchosen)
    plan = step_plan(run, topology, unchosen.mesh)
    fitting = None
    for meshes in [[mesh.resolve(number)]] if is_fixed else _tries(config, plan, topology):
        fitting = search(
            plan, meshes, topology.chip, fold=config.execution.fold, space=space, factors=factors
        )
        if fitting.fitting:
            break
    assert fitting is not None
    if is_fixed:
        for reason in fitting.refused.values():
            raise ValueError(reason)
    if not fitting.fitting and fitting.closest is None:
        examples = "\n  ".join(f"{mesh}: {why}" for mesh, why in list(fitting.refused.items())[-3:])
        raise ValueError(
            f"topology={topology.text}: none of the {fitting.num_meshes} meshes of {number} devices"
            f" divides this model and batch, such as\n  {examples}"
        )
    return fitting


def _tries(config: PlanConfig, plan: StepPlan, topology: Topology) -> list[list[MeshConfig]]:
    """Return the meshes to consider, then those to consider if none of them fits.

    Stages are tried where the devices span several networks, because a pipeline sends little
    between stages, and where nothing fits without.
    """
    number = topology.num_devices
    chip = topology.chip
    mesh = config.execution.mesh
    # A form of sequence parallelism lets the search choose seq.
    has_form = config.execution.sequence_parallel.name != "none"
    seq = None if has_form and mesh.seq == 1 else max(mesh.seq, 1)
    meshes = list(enumerate_meshes(number, seq, [mesh.stage]))
    if mesh.stage > 1 or config.part("gradient_comparison"):  # which needs all layers on one stage
        return [meshes]
    staged = [*meshes, *enumerate_meshes(number, seq, stages_of(plan, number))]
    return [staged] if chip.domain and number > chip.domain else [meshes, staged]


if __name__ == "__main__":
    run_command(main)
