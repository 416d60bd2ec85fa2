# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a configuration into model, parameter table and optimiser, without any device.

`check_mesh` checks that a mesh divides the batches, arrays, layers and experts of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax.numpy as jnp
import optax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.feed_forwards.moe.layout import check_dispatcher
from jaxmoe.layers.sequences import check_rows
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.optim.newton_schulz import newton_schulz_flops
from jaxmoe.optim.schedules import Schedule
from jaxmoe.parameters import Group, ParameterSpec, ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.run.config import PretrainConfig, TrainingConfig
from jaxmoe.scaling import Budget, Parameterization
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.tracking.console import format_flops
from jaxmoe.training.accumulation import accumulation_of
from jaxmoe.training.pipeline import check_pipeline
from sharding import axes as ax
from sharding.mesh import MeshConfig, named_sizes

_LARGE_UPDATE = 0.1
"""Share of the model's FLOPs from which those of the update are said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Model, parameter table and optimiser of a configuration, without any device."""

    config: PretrainConfig
    model: ModelConfig
    """Model with the forward multipliers of the parameterisation."""
    parameterization: Parameterization
    table: ParameterTable
    schedule: Schedule
    optimizer: optax.GradientTransformation
    raised: tuple[int, ...] = ()
    """Steps after which the learning rate is higher for a while, as after a lost stage."""

    def peak_rate(self, row: ParameterSpec) -> float:
        """Return the peak learning rate of one parameter, which the schedule multiplies."""
        return self.config.optimizer.peak_rate(row)

    @functools.cached_property
    def _plain_table(self) -> ParameterTable:
        """Parameter table of the model without an adapter."""
        return parameter_table(dataclasses.replace(self.model, adapter=None))

    @property
    def has_base(self) -> bool:
        """Whether an adapter has all parameters of a model beside its own."""
        if self.model.adapter is None:
            return False
        paths = {row.path for row in self.table}
        return all(row.path in paths for row in self._plain_table)

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints are saved and kept: the last before the decay of a schedule."""
        step = self.config.schedule.stable_step(self.config.training.steps)
        return () if step is None else (step,)

    def step_plan(self, execution: ExecutionConfig) -> StepPlan:
        """Return the train step, to be estimated or compiled without data.

        Args:
            execution: Execution with every size of the mesh filled in.
        """
        training = self.config.training
        return StepPlan(
            model=self.model,
            table=self.table,
            optimizer=self.optimizer,
            optimizer_config=self.config.optimizer,
            execution=execution,
            batch_size=training.batch_size,
            sequence_length=training.sequence_length,
            **training.step_options(parts=self.config.step_parts),
        )

    @property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token, without those of layers that are left out."""
        training = self.config.training
        left_out = 0.0 if training.skipping is None else training.skipping.share_left_out
        length = training.sequence_length
        table = self.table if self.model.adapter is None or self.has_base else self._plain_table
        backward = flops_per_token(self.model, table, length, left_out=left_out)
        return backward * (training.gradients.num_passes / 3.0)

    @property
    def matrix_flops(self) -> float:
        """FLOPs a step of Newton-Schulz, which makes the directions of matrices orthogonal."""
        total = 0.0
        for row in self.table.trained_rows:
            if self.config.optimizer.traits(row.hyper.group).has_whole_matrices:
                sides = row.declaration.fan(0), row.declaration.fan(1)
                total += row.size / math.prod(sides) * newton_schulz_flops(*sides)
        return total

    @property
    def matrix_rate(self) -> float:
        """Peak learning rate of the hidden matrices, which share one multiplier; where they are
        frozen, of the first parameter that is trained."""
        trained = self.table.trained_rows
        hidden = [row for row in trained if row.declaration.role == "attention_in"]
        return self.peak_rate((hidden or trained or self.table)[0])


def make_plan(config: PretrainConfig) -> RunPlan:
    """Return model, parameter table and optimiser of a configuration; touches no device.

    Args:
        config: Configuration of a run.

    Raises:
        ValueError: Two choices do not fit each other.
    """
    training = config.training
    parameterization = _parameterization(config)
    table = parameter_table(parameterization.model, parameterization, config.execution.axis_rules)
    schedule = config.schedule.build(training.steps)
    if training.batch_ramp is not None:
        schedule = training.batch_ramp.scale_schedule(schedule, training.batch_sizes)
    optimizer = config.replicas.adapt(config.optimizer, training.steps)
    return RunPlan(
        config=config,
        model=parameterization.model,
        parameterization=parameterization,
        table=table,
        schedule=schedule,
        optimizer=optimizer.build(table, by_updates(schedule, config)),
    )


def trained_groups(config: PretrainConfig) -> set[Group]:
    """Return the optimiser groups of the parameters that a configuration trains.

    Args:
        config: Configuration of a run; its optimiser is not read.

    Raises:
        ValueError: The model does not fit the parameterisation or the adapter.
    """
    parameterization = _parameterization(config)
    table = parameter_table(parameterization.model, parameterization, config.execution.axis_rules)
    return {row.hyper.group for row in table.trained_rows}


def by_updates(schedule: Schedule, config: PretrainConfig) -> Schedule:
    """Return the factor on the learning rate by update, of which a step on answers has several.

    Args:
        schedule: Factor by step.
        config: Configuration of the run.
    """
    updates = 1 if config.rl is None else config.rl.passes * config.rl.updates_per_pass
    return schedule if updates == 1 else lambda count: schedule(jnp.asarray(count) // updates)


def _parameterization(config: PretrainConfig) -> Parameterization:
    training = config.training
    tokens = config.training.tokens
    batch_tokens = training.batch_size * training.sequence_length
    if config.rl is not None:
        tokens *= config.rl.passes
        batch_tokens //= config.rl.updates_per_pass
    budget = Budget(tokens=tokens, batch_tokens=batch_tokens)
    return config.parameterization.build(config.model, budget, config.base)


def describe_update(plan: RunPlan) -> str:
    """Return what the directions of matrices cost as text; empty where that is little."""
    training = plan.config.training
    model = plan.flops_per_token * training.batch_size * training.sequence_length
    matrices = plan.matrix_flops
    if matrices < _LARGE_UPDATE * model:
        return ""
    return (
        f"Newton-Schulz takes {format_flops(matrices)} a step beside these, whatever the batch"
        f" ({matrices / model:.0%} of them); AdamW takes none"
    )


def describe_rates(plan: RunPlan) -> str:
    """Return the peak rate of each role as text; empty if all have the rate of the optimiser."""
    peak = plan.config.optimizer.learning_rate
    rates = dict[float, set[str]]()
    for row in plan.table.trained_rows:
        rates.setdefault(plan.peak_rate(row), set()).add(row.declaration.role)
    if set(rates) == {peak}:
        return ""
    each = [f"{rate:.3g} {', '.join(sorted(roles))}" for rate, roles in rates.items()]
    text = f"{next(iter(rates)):.3g}" if len(rates) == 1 else "; ".join(each)
    return f"{peak:g} at the base point, here {text}"


def check_mesh(plan: RunPlan, execution: ExecutionConfig, *, trains: bool) -> None:
    """Raise ValueError if a mesh does not divide batches, arrays, layers or experts.

    Args:
        plan: Plan of the run on this mesh.
        execution: Execution with every size of the mesh filled in.
        trains: Whether the run is trained on this mesh.
    """
    config = plan.config
    training = plan.config.training
    mesh_config = execution.mesh
    config = dataclasses.replace(config, execution=execution)  # checks the sizes of the mesh too
    names, counts = named_sizes(mesh_config, execution.mesh_fold)
    sizes = dict(zip(names, counts, strict=True))
    has_pipeline = mesh_config.stage > 1 or execution.pipeline_order.chunks > 1
    for _, rows in training.batch_sizes.stages:
        number = accumulation_of(rows, training.batch_size, training.accumulation)
        if has_pipeline:
            check_pipeline(plan.model, execution, number)
        step = dataclasses.replace(plan.step_plan(execution), accumulation=number)
        step.gradients.check(step)
    _check_workers(config, mesh_config, trains=trains)
    for rules in execution.state_layout.rules:
        plan.table.check_divides(rules, sizes)
    length = (training.sequence_length,)
    execution.axis_rules.check_divides("training.sequence_length", length, (ax.ACT_SEQ,), sizes)
    check_rows(plan.model.context, execution, training.sequence_length, sizes)
    _check_batches(config, mesh_config)
    _check_experts(plan, execution, mesh_config.batch_shards, sizes)


def _check_batches(config: PretrainConfig, mesh_config: MeshConfig) -> None:
    """Refuse batches that devices and micro-batches do not divide."""
    training = config.training
    parts = mesh_config.batch_shards * training.accumulation
    if config.rl is not None:
        config.rl.check_batches(training, mesh_config.batch_shards)
    if training.batch_size % parts:
        raise ValueError(
            f"training.batch_size={training.batch_size} must be divisible by the"
            f" {mesh_config.batch_shards} devices that share a batch (mesh replica x data x"
            f" expert) times training.accumulation={training.accumulation}: choose a multiple of"
            f" {parts}"
        )
    _check_ramp(training, mesh_config.batch_shards)
    if config.held_out_batch_size % mesh_config.batch_shards:
        raise ValueError(
            f"evaluation.batch_size={config.evaluation.batch_size} must be divisible by the"
            f" {mesh_config.batch_shards} devices that share a batch (mesh replica x data x"
            f" expert): choose a multiple of {mesh_config.batch_shards}"
        )


def _check_experts(
    plan: RunPlan, execution: ExecutionConfig, batch_shards: int, mesh: dict[str, int]
) -> None:
    """Refuse experts that the dispatcher cannot spread, in training or held-out batches."""
    training = plan.config.training
    config = plan.config
    model = plan.model
    update_rows = training.batch_size // (1 if config.rl is None else config.rl.updates_per_pass)
    check_dispatcher(
        model.moe,
        execution,
        num_layers=model.num_moe_layers,
        vocab_size=model.vocab_size,
        sizes=mesh,
    )
    for kind in plan.model.kinds:
        for rows in (update_rows // training.accumulation, config.held_out_batch_size):
            kind.feed_forward.check_execution(
                execution,
                sequences=rows // batch_shards,
                length=training.sequence_length,
                mesh=mesh,
            )


def _check_ramp(training: TrainingConfig, batch_shards: int) -> None:
    """Refuse a batch of the ramp that devices and micro-batches do not divide."""
    for _, rows in training.batch_sizes.stages[:-1]:
        accumulation = accumulation_of(rows, training.batch_size, training.accumulation)
        if rows % (batch_shards * accumulation):
            raise ValueError(
                f"training.batch_ramp has batches of {rows} sequences (of training.batch_size="
                f"{training.batch_size}) in {accumulation} micro-batches, whose sequences must be"
                f" divisible by the {batch_shards} devices that share a batch: choose fewer"
                " training.batch_ramp.stages or a larger batch"
            )


def _check_workers(config: PretrainConfig, mesh: MeshConfig, *, trains: bool) -> None:
    """Refuse batches that workers cannot share.

    Args:
        config: Configuration of a run.
        mesh: Mesh with every size filled in.
        trains: Whether the run is trained on this mesh.
    """
    replicas = config.replicas
    training = config.training
    if replicas.exchanges == "nothing":
        return
    number = replicas.num_workers(mesh.replica)
    devices = mesh.batch_shards // mesh.replica if trains else 1
    for _, rows in training.batch_sizes.stages:
        accumulation = accumulation_of(rows, training.batch_size, training.accumulation)
        if rows % (number * accumulation * devices):
            shared = f" times the {devices} devices that share the rows of a worker"
            raise ValueError(
                f"training.batch_size={rows} must be divisible by the {number} workers of replicas"
                f" {replicas.name!r} times training.accumulation={accumulation}"
                f"{shared * (devices > 1)}: choose a multiple of"
                f" {number * accumulation * devices}"
            )
