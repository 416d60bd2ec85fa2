# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Enumerates the meshes of a number of devices, and puts a plan on one of them.

To search another axis: `enumerate_meshes` in `jaxmoe/planning/search/meshes.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.sequences import check_rows
from jaxmoe.parameters import ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.training.pipeline import check_pipeline
from jaxmoe.training.pipeline.stages import ModelParts
from sharding import axes as ax
from sharding.fold import MoEMesh
from sharding.mesh import MeshConfig
from sharding.rules import LogicalAxisRules


def enumerate_meshes(
    num_devices: int, seq: int | None = 1, stages: Sequence[int] = (1,)
) -> Iterator[MeshConfig]:
    """Yield every mesh of a number of devices.

    Args:
        num_devices: Number of devices, all of them used.
        seq: Size of the axis seq; None tries every divisor.
        stages: Sizes of the axis stage; those that do not divide the devices are left out.
    """
    for stage in stages:
        if num_devices % stage:
            continue
        number = num_devices // stage
        for length in divisors(number) if seq is None else [seq]:
            if number % length:
                continue
            free = number // length
            for data in divisors(free):
                for tensor in divisors(free // data):
                    for expert in divisors(free // data // tensor):
                        yield MeshConfig(
                            replica=free // data // tensor // expert,
                            stage=stage,
                            data=data,
                            expert=expert,
                            seq=length,
                            tensor=tensor,
                        )


def stages_of(plan: StepPlan, num_devices: int) -> list[int]:
    """Return the sizes above 1 of the axis stage that divide devices and layers, by size.

    Args:
        plan: Step to plan.
        num_devices: Number of devices.
    """
    length = ModelParts.of(plan.model).staged.length
    chunks = plan.execution.pipeline_order.chunks
    return [n for n in divisors(num_devices) if n > 1 and length % (n * chunks) == 0]


Tables = dict[LogicalAxisRules, ParameterTable]
"""Parameters of a plan with the specs of some rules."""


class LaidOut(NamedTuple):
    """Parameters by the rules of an execution; its pipeline, dispatcher and remat are not read."""

    table: ParameterTable
    refusal: ValueError | None
    """Why the mesh does not divide parameters, sequences or heads; None where it does."""

    @classmethod
    def of(
        cls, plan: StepPlan, execution: ExecutionConfig, tables: Tables | None = None
    ) -> LaidOut:
        """Return the parameters of a plan by the rules of an execution.

        Args:
            plan: Step to plan; its own execution and the specs of its table are not read.
            execution: Execution with every size of its mesh filled in.
            tables: Tables of the plan by rules that other meshes have; a new one is added.
        """
        tables = {} if tables is None else tables
        length, rules, sizes = plan.sequence_length, execution.axis_rules, execution.mesh_sizes
        if rules not in tables:
            tables[rules] = plan.table_by(rules)
        table = tables[rules]
        try:
            for layout in execution.state_layout.rules:
                table.check_divides(layout, sizes)
            rules.check_divides("training.sequence_length", (length,), (ax.ACT_SEQ,), sizes)
            check_rows(plan.model.context, execution, length, sizes)
        except ValueError as error:
            return cls(table, error)
        return cls(table, None)


def on_mesh(plan: StepPlan, mesh: MeshConfig, fold: MoEMesh | None = None) -> StepPlan:
    """Return the plan on another mesh.

    Args:
        plan: Step to plan.
        mesh: Mesh with every size filled in.
        fold: Mesh of the experts within it, if they have their own.

    Raises:
        ValueError: See `with_execution`.
    """
    return with_execution(plan, dataclasses.replace(plan.execution, mesh=mesh, fold=fold))


def with_execution(
    plan: StepPlan,
    execution: ExecutionConfig,
    laid_out: Callable[[StepPlan, ExecutionConfig], LaidOut] = LaidOut.of,
    *,
    accumulation: int | None = None,
) -> StepPlan:
    """Return the plan with another execution.

    Args:
        plan: Step to plan.
        execution: Execution with every size of its mesh filled in.
        laid_out: `LaidOut.of`, or the same remembered.
        accumulation: Number of micro-batches; that of the plan when None.

    Raises:
        ValueError: The mesh does not divide a parameter, the heads, the layers or the batch.
    """
    accumulation = plan.accumulation if accumulation is None else accumulation
    layout = laid_out(plan, execution)
    moved = dataclasses.replace(
        plan, execution=execution, table=layout.table, accumulation=accumulation
    )
    check_pipeline(moved.model, execution, accumulation)
    moved.gradients.check(moved)
    if layout.refusal is not None:
        raise layout.refusal.with_traceback(None)
    shards = execution.mesh.batch_shards
    parts = shards * accumulation
    if plan.batch_size % parts:
        raise ValueError(
            f"training.batch_size={plan.batch_size} must be divisible by the {shards}"
            " devices that share a batch (mesh replica x data x expert) times"
            f" training.accumulation={accumulation}: choose a multiple of {parts}"
        )
    return moved


def mesh_in_words(mesh: MeshConfig) -> str:
    """Return the mesh as `data=16 tensor=2`, or `one device` if every axis has size 1."""
    sizes = mesh.by_axis.items()
    return " ".join(f"{axis}={size}" for axis, size in sizes if size != 1) or "one device"


def mesh_flags(mesh: MeshConfig) -> list[str]:
    """Return the mesh as words of a command line."""
    sizes = {axis: size for axis, size in mesh.by_axis.items() if size != 1 or axis == ax.DATA}
    return [
        word for axis, size in sizes.items() for word in (f"--execution.mesh.{axis}", str(size))
    ]


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, by size."""
    small = [d for d in range(1, math.isqrt(max(number, 1)) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))
