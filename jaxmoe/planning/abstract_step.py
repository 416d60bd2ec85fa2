# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Traces a train step on shapes: state and batch as `ShapeDtypeStruct`s on any mesh.

Nothing is computed and no device is needed: the mesh may be abstract, or hold the devices of a
topology that is not attached. The layouts are those of `init_state` and `global_batch`, because the
same functions are traced (`jax.eval_shape`).

To add a field of the batch: `abstract_batch` in `jaxmoe/planning/abstract_step.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import Optimizer
from jaxmoe.parameters import ParameterTable
from jaxmoe.training.state import TrainState, layers_on_host, state_around, trained_part
from jaxmoe.training.step import Step
from sharding.axes import BATCH_AXES, pieces
from sharding.mesh import abstract_mesh
from sharding.pipeline import Paths
from sharding.rules import LogicalAxisRules

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan(Step):
    """A step with the sizes of its batch: all that decides it except the devices of its mesh.

    Every size of the mesh is filled in.
    """

    table: ParameterTable = dataclasses.field()
    optimizer_config: Optimizer
    """Config that built the optimiser from the table."""
    batch_size: int
    """Sequences per step."""
    sequence_length: int

    def __post_init__(self):
        """Leave the checks to `planned_step`: a search compares steps that cannot all run."""

    @property
    def paths(self) -> Paths | None:
        """Groups of layers that each micro-batch passes through; None for all."""
        paths = self.gradients.paths(self.accumulation)
        return None if paths is None else paths.groups_of

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.sequence_length

    @property
    def mesh(self) -> AbstractMesh:
        """Abstract mesh, folded as the execution has it."""
        return abstract_mesh(self.execution.mesh, fold=self.execution.mesh_fold)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """Devices along each axis of the mesh, pieces of a folded one included."""
        return self.execution.mesh_sizes

    def on(self, execution: ExecutionConfig) -> StepPlan:
        """Return the same step under another execution, with new partition specs."""
        table = self.table_by(execution.axis_rules)
        return dataclasses.replace(self, execution=execution, table=table)

    def table_by(self, rules: LogicalAxisRules) -> ParameterTable:
        """Return the parameters with the partition specs of some rules."""
        rows = (
            dataclasses.replace(row, spec=rules.resolve(row.declaration.axes)) for row in self.table
        )
        return ParameterTable(tuple(rows))


def abstract_state(plan: StepPlan, mesh: AnyMesh) -> TrainState:
    """Return the state before the first step, as shapes with shardings on the mesh.

    Args:
        plan: Step to trace.
        mesh: Mesh with the plan's sizes.
    """
    shapes = plan.mesh
    execution = plan.execution
    dtype = execution.precision.parameter_dtype
    params = plan.table.tree(
        lambda row: jax.ShapeDtypeStruct(
            row.shape, row.stored_dtype(dtype), sharding=NamedSharding(shapes, row.spec)
        )
    )
    with jax.sharding.use_abstract_mesh(shapes):
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(
            lambda params, key: state_around(
                plan.model,
                plan.optimizer,
                execution,
                params,
                key,
                plan.gradients,
                plan.parts,
            ),
            params,
            key,
        )
    state = jax.tree.map(lambda leaf: _on(mesh, leaf), state)

    def waiting(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: _on(mesh, leaf, "pinned_host") if leaf.ndim else leaf, tree
        )

    away = layers_on_host(plan.model, execution)
    params = {
        name: waiting(module) if name in away else module for name, module in state.params.items()
    }
    is_away = execution.optimizer_memory != "device"
    opt_state = waiting(state.opt_state) if is_away else state.opt_state
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def shapes_after(function: Callable[[Any], Any], shapes: Any, mesh: Mesh) -> Any:
    """Return shapes and shardings of the result of a function, of which nothing is computed.

    Args:
        function: Function of one tree of arrays, in device memory.
        shapes: `ShapeDtypeStruct`s with shardings on the mesh.
        mesh: Mesh of the result.
    """
    with jax.set_mesh(mesh):
        results = jax.eval_shape(function, shapes)
    return jax.tree.map(lambda leaf: _on(mesh, leaf), results)


def _on(mesh: AnyMesh, leaf: Any, memory_kind: str | None = None) -> jax.ShapeDtypeStruct:
    spec = getattr(leaf.sharding, "spec", PartitionSpec())
    placed = NamedSharding(mesh, spec, memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def abstract_batch(plan: StepPlan, mesh: AnyMesh) -> Batch:
    """Return the batch of a step as shapes on the mesh; rows are whole documents.

    Args:
        plan: Step to trace.
        mesh: Mesh with the plan's sizes.
    """
    rows = NamedSharding(mesh, PartitionSpec(pieces(mesh.axis_names, BATCH_AXES), None))
    shape = (plan.batch_size, plan.sequence_length)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    return Batch(tokens=ids, targets=ids, loss_weights=weights)


def planned_step(plan: StepPlan) -> Any:
    """Return the jitted train step of a plan.

    Args:
        plan: Step to build.

    Raises:
        ValueError: See `Step.check`.
    """
    step = dataclasses.replace(plan, optimizer=trained_part(plan.model, plan.optimizer))
    step.check()
    return step.jit_step()


def trace_step(plan: StepPlan, mesh: AnyMesh) -> Any:
    """Return the traced step (`jax.stages.Traced`), to lower, compile or read as HLO.

    Args:
        plan: Step to trace; `execution.precision.compute` should not be "auto", which resolves by
            the devices of this process.
        mesh: Mesh with the plan's sizes.
    """
    step = planned_step(plan)
    state = abstract_state(plan, mesh)
    batch = abstract_batch(plan, mesh)
    # Not `set_mesh`: eager operations would run on devices that are not attached.
    context = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(context):
        return step.trace(state, batch)
