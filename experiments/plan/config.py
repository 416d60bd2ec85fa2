# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Config of `plan`: a recipe of pretrain, and the devices to plan for.

Every recipe and flag of pretrain is one of plan: a plan and its run differ only in the command.

To add a recipe: `experiments/recipes/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from experiments.recipes import RECIPES as PRETRAIN_RECIPES
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import KNOWN, Platform, Topology
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.plan import make_plan
from sharding.mesh import MeshConfig

_MESH_FLAG = "--execution.mesh."
_ACCUMULATION_FLAG = "--training.accumulation"
_OF_PRETRAIN = tuple(field.name for field in dataclasses.fields(PretrainConfig))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(PretrainConfig):
    """A pre-training run, planned."""

    topology: str = "tpu:v5e:16x16"
    """Devices, which need not be attached: tpu:v5e:16x16, gpu:h100:8, cpu:8."""
    compiles: int = 1
    """Largest number of meshes to compile ahead of time, fastest first, until one fits; 0 plans in
    closed form only."""
    measured_steps: int = 3
    """Steps to run the plan for, with cpu:N."""

    def __post_init__(self):
        PretrainConfig.__post_init__(self)
        if self.compiles < 0:
            raise ValueError(f"compiles={self.compiles} must be 0 (closed form only) or more")
        if self.measured_steps < 1:
            raise ValueError(f"measured_steps={self.measured_steps} must be at least 1")
        if not self.topology:
            raise ValueError(f"topology is empty: known are {KNOWN}")

    @property
    def pretrain(self) -> PretrainConfig:
        """Run to plan."""
        return PretrainConfig(**{name: getattr(self, name) for name in _OF_PRETRAIN})


def _planned(make: Callable[[], PretrainConfig]) -> Callable[[], PlanConfig]:
    def recipe() -> PlanConfig:
        config = make()
        return PlanConfig(**{name: getattr(config, name) for name in _OF_PRETRAIN})

    recipe.__doc__ = make.__doc__  # --help shows its first line
    return recipe


RECIPES: dict[str, Callable[[], PlanConfig]] = {
    name: _planned(make) for name, make in PRETRAIN_RECIPES.items()
}


def names_mesh(argv: Sequence[str]) -> bool:
    """Return whether a command line sets the mesh, which then is the only one considered."""
    return _names(argv, _MESH_FLAG)


def names_accumulation(argv: Sequence[str]) -> bool:
    """Return whether a command line sets the number of micro-batches, which then is kept."""
    return _names(argv, _ACCUMULATION_FLAG)


def _names(argv: Sequence[str], flag: str) -> bool:
    return any(word.replace("-", "_").startswith(flag.replace("-", "_")) for word in argv)


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
        mesh: Mesh with every size filled in.

    Raises:
        ValueError: Two choices of the config do not fit.
    """
    config = on_platform(config, topology.chip.platform)
    execution = dataclasses.replace(config.execution, mesh=mesh)
    return make_plan(dataclasses.replace(config, execution=execution)).step_plan(execution)
