# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The optimiser of a run: each parameter in exactly one group, by the table.

    w = w - lr(step) * learning_rate_multiplier(role) * direction(group)
    decay of w = weight_decay * weight_decay_multiplier(role), inside the same bracket

To add an optimiser: a config with `name` and `build`, into OptimizerConfig in
`jaxmoe/optim/__init__.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxmoe.optim.adamw import standard_promotion
from jaxmoe.optim.schedules import Schedule
from jaxmoe.parameters import ParameterTable


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
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled, times the learning rate; the role's multiplier multiplies it."""

    def __post_init__(self):
        if not 0.0 < self.learning_rate < float("inf"):
            raise ValueError(f"optimizer.learning_rate={self.learning_rate} must be above 0")
        for field in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"optimizer.{field}={getattr(self, field)} must lie in [0, 1)")
        if self.epsilon <= 0.0:
            raise ValueError(f"optimizer.epsilon={self.epsilon} must be above 0")
        if self.weight_decay < 0.0:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be 0 or more")

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
        peak = self.learning_rate if learning_rate is None else learning_rate
        strangers = sorted({row.hyper.group for row in table} - {"adamw"})
        if strangers:
            raise ValueError(f"the optimizer 'adamw' has no group {', '.join(strangers)}")

        def rate(count: Any) -> Any:
            return peak * schedule(jnp.asarray(count))

        chain = optax.chain(
            optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.epsilon),
            _decay(table, self.weight_decay),
            _scale_by_role(table),
            optax.scale_by_learning_rate(rate),
        )
        return standard_promotion(chain)


def _decay(table: ParameterTable, weight_decay: float) -> optax.GradientTransformation:
    """Adds each parameter times its own weight decay to the direction."""
    decays = table.tree(lambda row: weight_decay * row.hyper.weight_decay_multiplier)

    def add(updates: Any, params: Any) -> Any:
        return jax.tree.map(lambda d, u, p: u if d == 0.0 else u + d * p, decays, updates, params)

    return optax.stateless(add)


def _scale_by_role(table: ParameterTable) -> optax.GradientTransformation:
    """Multiplies each direction by its role's learning-rate multiplier."""
    factors = table.tree(lambda row: row.hyper.learning_rate_multiplier)

    def scale(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda f, u: u if f == 1.0 else f * u, factors, updates)

    return optax.stateless(scale)
