# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""AdamW with decoupled weight decay on matrices only (arXiv 1711.05101).

m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2
w = w - lr * (m_hat / (sqrt(v_hat) + epsilon) + decay * w)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jaxmoe.optim.groups import GroupMembers, GroupTraits, Optimizer
from jaxmoe.optim.matrices import map_axes
from jaxmoe.optim.steps import (
    Number,
    Rate,
    check_numbers,
    divides_safely,
    standard_promotion,
    straight_steps,
)
from jaxmoe.parameters import Group

ADAM = GroupTraits(moments_per_parameter=2)
"""Traits of a group under AdamW."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdamWFields(Optimizer):
    """Numbers of AdamW, for an optimiser whose last part it is."""

    learning_rate: float = 3e-3
    """Peak learning rate; the schedule and the role's multiplier multiply it."""
    beta1: float = 0.9
    """Decay rate for the first moment."""
    beta2: float = 0.95
    """Decay rate for the second moment."""
    epsilon: float = 1e-8
    """Number added to the root of the second moment; the role's multiplier multiplies it."""
    weight_decay: float = 0.1
    """Decoupled weight decay, times the learning rate and the role's multiplier."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig(AdamWFields):
    """AdamW for every role."""

    name: ClassVar[str] = "adamw"
    stays_finite: ClassVar[bool] = True
    groups: ClassVar[Mapping[Group, GroupTraits]] = {"adamw": ADAM}

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return AdamW for the group."""
        return adamw_group(members, self)


def adamw(
    learning_rate: Rate,
    *,
    matrix_axes: Any = (-2, -1),
    beta1: Number = 0.9,
    beta2: Number = 0.95,
    epsilon: Number = 1e-8,
    weight_decay: Number = 0.0,
) -> optax.GradientTransformation:
    """Return AdamW with weight decay on matrices and not on vectors.

    Args:
        learning_rate: A number, or a function of the optimiser's step.
        matrix_axes: Two axes that form a matrix in every parameter of two dimensions and more, or a
            tree like the parameters with such a pair, or None for a vector; see
            `jaxmoe.optim.matrices`. Only whether there is a matrix matters.
        beta1: Decay rate for the first moment.
        beta2: Decay rate for the second moment.
        epsilon: Number added to the root of the second moment.
        weight_decay: Decoupled decay for matrices, times the learning rate, per step.

    Raises:
        ValueError: A moment's decay is outside [0, 1), or the weight decay is negative; at an
            update with weight decay, the parameters are missing.
    """
    check_numbers(beta1=beta1, beta2=beta2, weight_decay=weight_decay)

    def decay(path: Any, axes: Any, leaf: Any) -> Number:
        del path
        return weight_decay * (axes is not None and jnp.ndim(leaf) >= 2)

    def decays(directions: Any) -> Any:
        return map_axes(decay, directions, matrix_axes, "adamw")

    adam = optax.scale_by_adam(b1=beta1, b2=beta2, eps=epsilon)
    return standard_promotion(
        straight_steps(adam, learning_rate, weight_decay=decays),
        stays_finite=divides_safely(epsilon),
    )


def adamw_group(members: GroupMembers, config: Any) -> optax.GradientTransformation:
    """Return AdamW for a group.

    Args:
        members: The group.
        config: Any config with beta1, beta2, epsilon and weight_decay.
    """
    return straight_steps(
        adam_directions(members, config),
        members.rate,
        weight_decay=members.decays(config.weight_decay),
        multiplier=members.multipliers(),
    )


def adam_directions(members: GroupMembers, config: Any) -> optax.GradientTransformation:
    """Return Adam's directions for a group, each parameter with its own epsilon.

    Adam's direction with epsilon k e is its direction with epsilon e for gradients divided by k.

    Args:
        members: The group.
        config: Any config with beta1, beta2 and epsilon.
    """
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    factors = members.tree(lambda row: row.hyper.epsilon_multiplier)
    if all(factor == 1.0 for factor in jax.tree.leaves(factors)):
        return adam

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return adam.update(jax.tree.map(lambda k, g: g / k, factors, updates), state, params)

    return optax.GradientTransformation(adam.init, update)
