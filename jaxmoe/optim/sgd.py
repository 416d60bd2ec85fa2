# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent, optax's, for parameters of every group.

m = momentum m + g,   w = w - lr * (m + decay * w)

Directions have the scale of the gradient, which nothing normalises: gradients that are estimated
along random directions need that (`jaxmoe.training.estimators`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import optax

from jaxmoe.optim.groups import GroupMembers, GroupTraits, Optimizer
from jaxmoe.optim.steps import straight_steps
from jaxmoe.parameters import Group

_TRAITS = GroupTraits(moments_per_parameter=1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig(Optimizer):
    """Gradient descent for every role, in whichever group the parameterisation puts it."""

    name: ClassVar[str] = "sgd"
    groups: ClassVar[Mapping[Group, GroupTraits]] = {
        "adamw": _TRAITS,
        "muon": _TRAITS,
        "muonh": _TRAITS,
        "adamh": _TRAITS,
    }

    learning_rate: float = 1e-2
    """Peak learning rate; the schedule and the role's multiplier multiply it."""
    momentum: float = 0.0
    """Decay rate of the sum of gradients; 0 keeps none."""
    weight_decay: float = 0.0
    """Decoupled weight decay, times the learning rate and the role's multiplier."""

    def transformation(self, members: GroupMembers) -> optax.GradientTransformation:
        """Return gradient descent for the group."""
        directions = optax.trace(self.momentum) if self.momentum else optax.identity()
        return straight_steps(
            directions,
            members.rate,
            weight_decay=members.decays(self.weight_decay),
            multiplier=members.multipliers(),
        )
