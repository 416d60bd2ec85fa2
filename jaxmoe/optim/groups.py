# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser of a run: each parameter in exactly one group, by the table.

    w = w - rate(step) * (learning_rate_multiplier(role) * direction(group) + decay * w)

    rate   = learning_rate * schedule(step)
    decay  = learning_rate_multiplier * weight_decay * weight_decay_multiplier
           = weight_decay * weight_decay_multiplier / learning_rate      where it is independent

so that an independent decay takes `weight_decay * schedule(step)` of w in a step, whatever the
learning rate. On a sphere the same step is followed by the projection.

A role's epsilon costs no second optimiser: Adam's direction with epsilon k e is its direction with
epsilon e for gradients divided by k.

The parameterisation decides which group a role is in, the config here what the groups do.
`jaxmoe/optim/matrix_groups.py` has the configs for matrices.

To add an optimiser: a config with `name` and `build`, into OptimizerConfig in
`jaxmoe/optim/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxmoe.optim.adamw import standard_promotion
from jaxmoe.optim.schedules import Schedule
from jaxmoe.parameters import Group, ParameterSpec, ParameterTable


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig:
    """AdamW for every role."""

    name: ClassVar[str] = "adamw"

    learning_rate: float = 3e-3
    """Peak; the schedule and the role's multiplier multiply it."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment; the role's multiplier multiplies it."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; the role's multiplier multiplies it."""

    def __post_init__(self):
        check_fields(self)

    def build(
        self,
        table: ParameterTable,
        schedule: Schedule,
        *,
        learning_rate: Float[Array, ""] | None = None,
    ) -> optax.GradientTransformation:
        """The optimiser of a model.

        Args:
            table: multipliers and groups of its parameters.
            schedule: factor on the learning rate by step.
            learning_rate: peak, where it is an argument of the compiled step; the config's when
                None.

        Raises:
            ValueError: a parameter belongs to a group that this optimiser does not have.
        """
        check_groups(table, self.name, ("adamw",))
        peak = self.learning_rate if learning_rate is None else learning_rate
        members = Members(table=table, group="adamw", schedule=schedule, peak=peak)
        return standard_promotion(adamw_group(members, self))


def check_fields(config: Any) -> None:
    """Refuses numbers out of range, of whichever of these fields a config has.

    Raises:
        ValueError: naming the field, the rule and the value.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        where = f"optimizer.{field.name}={value}"
        match field.name:
            case "learning_rate" | "epsilon" | "adamw_ratio":
                if not 0.0 < value < float("inf"):
                    raise ValueError(f"{where} must be above 0, and finite")
            case "beta1" | "beta2" | "momentum":
                if not 0.0 <= value < 1.0:
                    raise ValueError(f"{where} must lie in [0, 1)")
            case "weight_decay":
                if not 0.0 <= value < float("inf"):
                    raise ValueError(f"{where} must be 0 or more, and finite")


def check_groups(table: ParameterTable, name: str, groups: tuple[Group, ...]) -> None:
    """Refuses a table with a group that an optimiser does not have.

    Args:
        table: of the model.
        name: of the optimiser.
        groups: what it has.
    """
    for row in table:
        if row.hyper.group not in groups:
            home = "muon" if row.hyper.group == "muon" else "muonh"
            raise ValueError(
                f"the optimizer {name!r} has no group {row.hyper.group}, where the parameterization"
                f" puts {row.path}: choose optimizer:{home}, or another parameterization"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Members:
    """The parameters of one group, and what its rate is made of."""

    table: ParameterTable
    group: Group
    schedule: Schedule
    peak: float | Float[Array, ""]

    def rate(self, count: Any) -> Array:
        """The learning rate at a step."""
        return self.peak * self.schedule(jnp.asarray(count))

    def tree(self, function: Callable[[ParameterSpec], Any]) -> dict[str, Any]:
        """`function(row)` of the group's parameters; those of other groups are left out."""
        return self.table.tree(
            lambda row: function(row) if row.hyper.group == self.group else optax.MaskedNode()
        )

    def multipliers(self) -> dict[str, Any]:
        """Of the learning rate, by parameter."""
        return self.tree(lambda row: row.hyper.learning_rate_multiplier)

    def decays(self, weight_decay: float) -> dict[str, Any]:
        """What multiplies a parameter beside its direction; see the head of this file."""

        def decay(row: ParameterSpec) -> Any:
            own = weight_decay * row.hyper.weight_decay_multiplier
            if own == 0.0 or not row.hyper.has_independent_decay:
                return own * row.hyper.learning_rate_multiplier
            return own / self.peak

        return self.tree(decay)


def adamw_group(members: Members, config: Any) -> optax.GradientTransformation:
    """AdamW for a group.

    Args:
        members: the group.
        config: with beta1, beta2, epsilon and weight_decay.
    """
    return flat_steps(members, scale_by_adam(members, config), config.weight_decay)


def scale_by_adam(members: Members, config: Any) -> optax.GradientTransformation:
    """Adam's directions for a group, each parameter with its own epsilon."""
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    factors = members.tree(lambda row: row.hyper.epsilon_multiplier)
    if all(factor == 1.0 for factor in jax.tree.leaves(factors)):
        return adam

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return adam.update(jax.tree.map(lambda k, g: g / k, factors, updates), state, params)

    return optax.GradientTransformation(adam.init, update)


def flat_steps(
    members: Members, directions: optax.GradientTransformation, weight_decay: float
) -> optax.GradientTransformation:
    """Straight steps: multipliers, decay and rate behind the directions of a group."""
    multipliers, decays = members.multipliers(), members.decays(weight_decay)

    def scale(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda f, u: u if _is(f, 1.0) else f * u, multipliers, updates)

    def add_decay(updates: Any, params: Any) -> Any:
        return jax.tree.map(
            lambda d, u, p: u if _is(d, 0.0) else u + d * p, decays, updates, params
        )

    return optax.chain(
        directions,
        optax.stateless(scale),
        optax.stateless(add_decay),
        optax.scale_by_learning_rate(members.rate),
    )


def _is(value: Any, number: float) -> bool:
    return isinstance(value, float) and value == number
