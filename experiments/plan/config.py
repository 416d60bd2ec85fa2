# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Config of `plan`: a recipe of pretrain, and the devices to plan for.

Every recipe and flag of pretrain is one of plan: a plan and its run differ only in the command.

To add a recipe: `experiments/recipes/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from experiments.cli.continuation import named_fields
from experiments.recipes import RECIPES as PRETRAIN_RECIPES
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.corrections.measured import measured_chip
from jaxmoe.planning.hardware import KNOWN, Platform, Topology
from jaxmoe.planning.network.links import LinkTable
from jaxmoe.planning.network.measured import linked_chip
from jaxmoe.planning.network.page import NetworkConfig, host_links
from jaxmoe.planning.search import EVERYTHING, Space
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from sharding.axes import MESH_AXES
from sharding.mesh import MeshConfig

_KEPT_BY = {
    "rules": ("execution.rules",),
    "dispatchers": ("execution.dispatcher",),
    "pipelines": ("execution.pipeline",),
    "remats": ("execution.remat", "execution.remat_dense"),
    "has_folds": ("execution.fold",),
    "has_micro_batches": ("training.accumulation",),
}
"""Choices that a search may change, and the fields of a command line that keep them."""
_OF_PRETRAIN = tuple(field.name for field in dataclasses.fields(PretrainConfig))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(PretrainConfig):
    """A pre-training run, planned."""

    topology: str = "tpu:v5e:16x16"
    """Devices, which need not be attached: tpu:v5e:16x16, gpu:h100:8, cpu:8."""
    search: Literal["all", "mesh"] = "all"
    """Choices to search: mesh, micro-batches, layout, dispatcher, fold, schedule and remat, but for
    those that a flag sets; or mesh and micro-batches only."""
    measured_run: str = ""
    """Run directory whose measured step replaces the assumed efficiency of the devices."""
    network: NetworkConfig = NetworkConfig()
    """Network between the hosts: measured links, network cards, switches."""
    compiles: int = 3
    """Largest number of plans to compile ahead of time, fastest first, until one fits; 0 plans in
    closed form only."""
    calibrate: bool = False
    """Compile the best plan with two thirds of its layers first, and predict memory from these."""
    measured_steps: int = 3
    """Steps to run the plan for, with cpu:N."""

    def __post_init__(self):
        PretrainConfig.__post_init__(self)
        if self.compiles < 0:
            raise ValueError(f"compiles={self.compiles} must be 0 (closed form only) or more")
        if self.calibrate and not self.compiles:
            raise ValueError("calibrate compiles, and compiles=0 does not: leave one of them out")
        if self.measured_steps < 1:
            raise ValueError(f"measured_steps={self.measured_steps} must be at least 1")
        if not self.topology:
            raise ValueError(f"topology is empty: known are {KNOWN}")

    @property
    def pretrain(self) -> PretrainConfig:
        """Run to plan."""
        return PretrainConfig(**{name: getattr(self, name) for name in _OF_PRETRAIN})


def _plan(make: Callable[[], PretrainConfig]) -> Callable[[], PlanConfig]:
    def recipe() -> PlanConfig:
        config = make()
        return PlanConfig(**{name: getattr(config, name) for name in _OF_PRETRAIN})

    # --help shows the first line of its text, or of its file.
    recipe.__doc__, recipe.__module__ = make.__doc__, make.__module__
    return recipe


RECIPES: dict[str, Callable[[], PlanConfig]] = {
    name: _plan(make) for name, make in PRETRAIN_RECIPES.items()
}


def names_mesh(argv: Sequence[str]) -> bool:
    """Return whether a command line sets the mesh, which then is the only one considered."""
    return _names(argv, "execution.mesh")


def space_of(config: PlanConfig, argv: Sequence[str]) -> Space:
    """Return the choices that a search may change.

    A mesh on the command line is planned as the config has it but for micro-batches, and a choice
    on the command line is kept. A batch that grows keeps its micro-batches, which divide each of
    its sizes.

    Args:
        config: Run to plan.
        argv: Command line.
    """
    fields = {field for field, kept in _KEPT_BY.items() if any(_names(argv, path) for path in kept)}
    if config.execution.fold is not None:
        fields.add("has_folds")
    if config.training.batch_ramp is not None:
        fields.add("has_micro_batches")
    if config.search == "mesh" or names_mesh(argv):
        fields |= _KEPT_BY.keys() - {"has_micro_batches"}
    single = {field: type(getattr(EVERYTHING, field))() for field in fields}
    return dataclasses.replace(EVERYTHING, **single)


def _names(argv: Sequence[str], path: str) -> bool:
    """Return whether a command line names a field, in either spelling, or one below it."""
    return any(name == path or name.startswith(f"{path}.") for name in named_fields(argv))


def on_platform(config: PretrainConfig, platform: Platform) -> PretrainConfig:
    """Return the config with every dtype "auto" replaced by that of a platform.

    Args:
        config: Run to plan.
        platform: Platform to plan for.
    """
    compute = "float32" if platform == "cpu" else "bfloat16"
    execution = config.execution
    if execution.precision.compute == "auto":
        precision = dataclasses.replace(execution.precision, compute=compute)
        execution = dataclasses.replace(execution, precision=precision)
    optimizer = config.optimizer.resolve_dtype(compute)
    return dataclasses.replace(config, execution=execution, optimizer=optimizer)


def step_plan(config: PretrainConfig, topology: Topology, mesh: MeshConfig) -> StepPlan:
    """Return the train step of a run on a mesh of a topology.

    Args:
        config: Run to plan.
        topology: Devices to plan for.
        mesh: Mesh with every size filled in, or with -1 where none is chosen yet.

    Raises:
        ValueError: Two choices of the config do not fit.
    """
    config = on_platform(config, topology.chip.platform)
    execution = dataclasses.replace(config.execution, mesh=mesh)
    return make_plan(dataclasses.replace(config, execution=execution)).step_plan(execution)


def measured_topology(config: PlanConfig, topology: Topology) -> Topology:
    """Return the topology with what is known of it: overlap, links, and the efficiency of a run.

    Args:
        config: Run to plan.
        topology: Devices to plan for.

    Raises:
        ValueError: The run has not ended, or its step is not possible on these devices.
    """
    chip = dataclasses.replace(topology.chip, overlap=config.network.overlap)
    topology = dataclasses.replace(topology, measured=chip)
    if config.network.links is not None:
        chip = linked_chip(topology.chip, LinkTable.load(config.network.links))
        topology = dataclasses.replace(topology, measured=chip)
    links = host_links(config.network, topology.num_devices, config.process_order)
    chip = dataclasses.replace(topology.chip, host_links=links)
    topology = dataclasses.replace(topology, measured=chip)
    if not config.measured_run:
        return topology
    directory = RunDirectory(config.measured_run)
    run = directory.load_config(PretrainConfig)
    summary = directory.summary()
    if not summary or not summary.get("tokens_per_second"):
        raise ValueError(
            f"measured_run={config.measured_run} has no tokens_per_second in its summary.json: let"
            " the run end"
        )
    sizes = {axis: size for axis, size in summary["mesh"].items() if axis in MESH_AXES}
    mesh = MeshConfig(**sizes)
    plan = step_plan(run, topology, mesh)
    chip = measured_chip(topology.chip, plan, plan.tokens / summary["tokens_per_second"])
    return dataclasses.replace(topology, measured=chip)
