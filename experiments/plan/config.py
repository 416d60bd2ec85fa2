# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What `plan` is asked: a recipe of pretrain, and the devices it should run on.

Every recipe of pretrain is one of plan, and every flag of pretrain one of plan, so that a plan and
its run differ by the name of the command alone.

To add a recipe: see `experiments/recipes`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

from experiments.recipes import RECIPES as PRETRAIN_RECIPES
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.planning.hardware import KNOWN, Platform, Topology
from jaxmoe.run.assemble import make_plan
from jaxmoe.run.config import PretrainConfig
from sharding.mesh import MeshConfig

_MESH_FLAG = "--execution.mesh."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig(PretrainConfig):
    """A pre-training run, planned."""

    topology: str = "tpu:v5e:16x16"
    """The devices, which need not be there: tpu:v5e:16x16, gpu:h100:8, cpu:8."""
    compiles: int = 1
    """Meshes that are compiled ahead of time at most, the fastest first, until one fits; 0 plans in
    closed form only."""
    measured_steps: int = 3
    """With cpu:N, steps that the plan is run for."""

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
        """The run that is planned."""
        names = [field.name for field in dataclasses.fields(PretrainConfig)]
        return PretrainConfig(**{name: getattr(self, name) for name in names})


def _recipe(make: Callable[[], PretrainConfig]) -> PlanConfig:
    config = make()
    fields = dataclasses.fields(PretrainConfig)
    return PlanConfig(**{field.name: getattr(config, field.name) for field in fields})


def _planned(make: Callable[[], PretrainConfig]) -> Callable[[], PlanConfig]:
    recipe = partial(_recipe, make)
    recipe.__doc__ = make.__doc__  # its first line is shown by --help
    return recipe


RECIPES: dict[str, Callable[[], PlanConfig]] = {
    name: _planned(make) for name, make in PRETRAIN_RECIPES.items()
}


def names_mesh(argv: Sequence[str]) -> bool:
    """Whether a command line says which mesh is meant: then no other is looked at."""
    return any(word.replace("-", "_").startswith(_MESH_FLAG.replace("-", "_")) for word in argv)


def on_platform(config: PretrainConfig, platform: Platform) -> PretrainConfig:
    """The config with the dtypes that "auto" means on a platform, which need not be this one.

    Args:
        config: of the run.
        platform: on which it will run.
    """
    compute = "float32" if platform == "cpu" else "bfloat16"
    execution = config.execution
    if execution.precision.compute == "auto":
        precision = dataclasses.replace(execution.precision, compute=compute)
        execution = dataclasses.replace(execution, precision=precision)
    optimizer = config.optimizer.resolve_dtype(compute)
    return dataclasses.replace(config, execution=execution, optimizer=optimizer)


def step_plan(config: PretrainConfig, topology: Topology, mesh: MeshConfig) -> StepPlan:
    """The train step of a run on a mesh, as it would be on a topology.

    Args:
        config: of the run.
        topology: for which.
        mesh: with every size filled in.

    Raises:
        ValueError: choices that do not fit one another.
    """
    config = on_platform(config, topology.chip.platform)
    execution = dataclasses.replace(config.execution, mesh=mesh)
    plan, training = make_plan(dataclasses.replace(config, execution=execution)), config.training
    return StepPlan(
        model=plan.model,
        table=plan.table,
        optimizer=plan.optimizer,
        optimizer_config=config.optimizer,
        execution=execution,
        batch_size=training.batch_size,
        sequence_length=training.sequence_length,
        accumulation=training.accumulation,
        clip=training.clip,
        accumulated_balance=training.accumulated_balance,
        objective=training.objective,
    )
