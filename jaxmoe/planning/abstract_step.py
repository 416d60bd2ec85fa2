# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A train step of shapes: state and batch as `ShapeDtypeStruct`s on any mesh, and the trace.

Nothing is computed and no device is asked for: the mesh may be abstract, or of the devices of a
topology that is not there. The layouts are those that `init_state` and `global_batch` would give,
because the same functions are traced (`jax.eval_shape`), not a copy of their rules.

To add something to the batch: its field in `abstract_batch`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import Optimizer
from jaxmoe.parameters import ParameterTable
from jaxmoe.training import ObjectiveConfig
from jaxmoe.training.balance import AccumulatedBalance
from jaxmoe.training.state import TrainState, state_around
from jaxmoe.training.step import make_train_step
from sharding.axes import BATCH_AXES, pieces
from sharding.mesh import abstract_mesh

AnyMesh = Mesh | AbstractMesh

# One device of each platform that a step may be lowered for; which of them decides nothing yet.
_KINDS = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H100 80GB HBM3", "cpu": "cpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """All that decides a train step, without its mesh's devices."""

    model: ModelConfig
    table: ParameterTable
    optimizer: optax.GradientTransformation
    optimizer_config: Optimizer
    """Config that built the optimiser from the table."""
    execution: ExecutionConfig
    """With every size of the mesh filled in."""
    batch_size: int
    """Sequences of one step."""
    sequence_length: int
    accumulation: int = 1
    clip: float | None = 1.0
    accumulated_balance: AccumulatedBalance = "buffer"
    objective: ObjectiveConfig | None = None

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch_size * self.sequence_length

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh without its devices, folded as the execution says."""
        return abstract_mesh(self.execution.mesh, fold=self.execution.fold)

    def on(self, execution: ExecutionConfig) -> StepPlan:
        """The same step computed in another way, its parameters laid out anew."""
        rules = execution.axis_rules
        rows = (
            dataclasses.replace(row, spec=rules.resolve(row.declaration.axes)) for row in self.table
        )
        return dataclasses.replace(self, execution=execution, table=ParameterTable(tuple(rows)))


def abstract_state(plan: StepPlan, mesh: AnyMesh) -> TrainState:
    """The state before the first step, as shapes with shardings on the mesh.

    Args:
        plan: of the step.
        mesh: of the plan's sizes.
    """
    shapes, execution = plan.mesh, plan.execution
    dtype = execution.precision.parameter_dtype
    params = plan.table.tree(
        lambda row: jax.ShapeDtypeStruct(row.shape, dtype, sharding=NamedSharding(shapes, row.spec))
    )
    with jax.sharding.use_abstract_mesh(shapes):
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(
            lambda params, key: state_around(plan.model, plan.optimizer, execution, params, key),
            params,
            key,
        )
    state = jax.tree.map(lambda leaf: _on(mesh, leaf), state)
    if execution.optimizer_memory == "device":
        return state
    waiting = jax.tree.map(
        lambda leaf: _on(mesh, leaf, "pinned_host") if leaf.ndim else leaf, state.opt_state
    )
    return dataclasses.replace(state, opt_state=waiting)


def _on(mesh: AnyMesh, leaf: Any, memory_kind: str | None = None) -> jax.ShapeDtypeStruct:
    spec = getattr(leaf.sharding, "spec", PartitionSpec())
    placed = NamedSharding(mesh, spec, memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed)


def abstract_batch(plan: StepPlan, mesh: AnyMesh) -> Batch:
    """The batch of a step whose rows are whole documents, as shapes on the mesh.

    Args:
        plan: of the step.
        mesh: of the plan's sizes.
    """
    rows = NamedSharding(mesh, PartitionSpec(pieces(mesh.axis_names, BATCH_AXES), None))
    shape = (plan.batch_size, plan.sequence_length)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=rows)
    return Batch(tokens=ids, targets=ids, loss_weights=weights)


def planned_step(plan: StepPlan) -> Any:
    """The jitted training step of a plan.

    Args:
        plan: of the step.
    """
    return make_train_step(
        plan.model,
        plan.optimizer,
        execution=plan.execution,
        accumulation=plan.accumulation,
        clip=plan.clip,
        accumulated_balance=plan.accumulated_balance,
        objective=plan.objective,
        table=plan.table,
    )


def trace_step(plan: StepPlan, mesh: AnyMesh) -> Any:
    """The traced step (`jax.stages.Traced`): its `lower()` may be compiled, or its HLO read.

    Args:
        plan: of the step; `execution.precision.compute` should not be "auto", which asks for the
            devices of this process.
        mesh: of the plan's sizes.
    """
    step = planned_step(plan)
    state, batch = abstract_state(plan, mesh), abstract_batch(plan, mesh)
    # Not `set_mesh`: under a mesh of devices that are not there an eager operation would run on
    # them.
    context = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(context):
        return step.trace(state, batch)


def lower_abstractly(plan: StepPlan, platform: str) -> Any:
    """The lowered step on an abstract mesh, for as many devices as its sizes multiply to.

    Args:
        plan: of the step.
        platform: "tpu", "cuda" or "cpu".
    """
    # The mesh says for which platform the step is traced: its kernels, and its way to the experts.
    device = AbstractDevice(_KINDS[platform], None, platform) if platform in _KINDS else None
    traced = trace_step(plan, plan.mesh.update(abstract_device=device))
    return traced.lower(lowering_platforms=(platform,))
