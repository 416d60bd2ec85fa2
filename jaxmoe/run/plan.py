# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Turns a configuration into model, parameter table and optimiser, without any device."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import optax

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.flops import flops_per_token
from jaxmoe.optim.schedules import Schedule
from jaxmoe.parameters import Group, ParameterSpec, ParameterTable
from jaxmoe.planning.abstract_step import StepPlan
from jaxmoe.run.config import PretrainConfig
from jaxmoe.scaling import Budget, Parameterization
from jaxmoe.scaling.initialize import parameter_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
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
        table, adapter = self.table, self.model.adapter
        if adapter is not None and adapter.makes_matrices:
            table = parameter_table(dataclasses.replace(self.model, adapter=None))
        backward = flops_per_token(self.model, table, length, left_out=left_out)
        return backward * (training.gradients.num_passes / 3.0)

    @property
    def matrix_rate(self) -> float:
        """Peak learning rate of the hidden matrices, which share one multiplier; where they are
        frozen, of the first parameter that is trained."""
        trained = self.table.trained_rows
        hidden = [row for row in trained if row.declaration.role == "attention_in"]
        return self.peak_rate((hidden or trained or self.table)[0])


def make_plan(config: PretrainConfig) -> Plan:
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
        schedule = training.batch_ramp.scaled(schedule, training.batch_sizes)
    optimizer = config.replicas.adapt(config.optimizer, training.steps)
    return Plan(
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
    updates = 1 if config.rl is None else config.rl.num_updates
    return schedule if updates == 1 else lambda count: schedule(jnp.asarray(count) // updates)


def _parameterization(config: PretrainConfig) -> Parameterization:
    training, tokens = config.training, config.training.tokens
    batch_tokens = training.batch_size * training.sequence_length
    if config.rl is not None:
        tokens *= config.rl.epochs
        batch_tokens //= config.rl.minibatches
    budget = Budget(tokens=tokens, batch_tokens=batch_tokens)
    return config.parameterization.build(config.model, budget, config.base)


def describe_rates(plan: Plan) -> str:
    """Return the peak rate of each role as text; empty if all have the rate of the optimiser."""
    peak, rates = plan.config.optimizer.learning_rate, dict[float, set[str]]()
    for row in plan.table.trained_rows:
        rates.setdefault(plan.peak_rate(row), set()).add(row.declaration.role)
    if set(rates) == {peak}:
        return ""
    each = [f"{rate:.3g} {', '.join(sorted(roles))}" for rate, roles in rates.items()]
    here = f"{next(iter(rates)):.3g}" if len(rates) == 1 else "; ".join(each)
    return f"{peak:g} at the base point, here {here}"
