# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Standard parameterisation: variance 1/fan_in, one learning rate for every role.

    matrices            normal, std 1 / sqrt(fan_in)
    into the residual   the same times 1 / sqrt(2 L), so that the stream does not grow with depth
    embedding           normal, std 0.02
    gains               1

One learning rate for every role, no forward multipliers, weight decay on matrices only. A learning
rate tuned here does not transfer to another width or depth; HyperP's does.

ArchScale's standard one has std 0.02 for every matrix, 1e-4 for the embedding, and the law of the
batch: matrix_std=0.02, embedding_std=1e-4, exponents.batch=0.5. It also decays gains and embedding,
which this one does not.

`matrices` puts hidden matrices, experts and router into the group of another optimiser under the
usual initial values, and the head into the group that this optimiser has for it. Matrices that
start at zero stay with AdamW.

Source: GPT-2 (Radford et al. 2019, section 2.3) for the residual factor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxmoe.declarations import ROLES, Role
from jaxmoe.models.config import ModelConfig
from jaxmoe.optim import OPTIMIZERS
from jaxmoe.parameters import Group, Hyperparameters
from jaxmoe.scaling import laws
from jaxmoe.scaling.parameterization import (
    BasePoint,
    Budget,
    Parameterization,
    ParameterizationBase,
)
from jaxmoe.scaling.tables import ROLE_CLASSES

EMBEDDING_STD = 0.02

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardExponents(laws.BatchExponents):
    """Power of the law of the batch, which is off by default."""

    batch: float = 0.0
    """The rate grows as (batch / base batch) to this power; 0 turns the law off."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardConfig(ParameterizationBase):
    """Variance 1/fan_in, one learning rate for every role."""

    name: ClassVar[str] = "standard"

    matrices: OptimizerName = "adamw"
    """Optimiser for hidden matrices, experts and router; with muonh the head is in AdamH's
    group."""
    matrix_std: float | None = None
    """Standard deviation of every initial matrix but the embedding; None is 1/sqrt(fan_in), and
    less into the residual stream."""
    embedding_std: float = EMBEDDING_STD
    """Standard deviation of the initial embedding."""
    exponents: StandardExponents | None = None
    """Powers of the laws; None for no law."""

    def __post_init__(self):
        for field in ("matrix_std", "embedding_std"):
            value = getattr(self, field)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"parameterization.{field}={value} must be above 0")

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the parameterisation of a model; see `standard`."""
        return standard(model, budget, base, self)


def standard(
    model: ModelConfig,
    budget: Budget | None = None,
    base: BasePoint | None = None,
    options: StandardConfig | None = None,
) -> Parameterization:
    """Return the standard parameterisation of a model.

    Args:
        model: Model to train, returned unchanged with its multipliers.
        budget: Tokens of the run and of a step; needed if the batch law is on.
        base: Point at which the rate was tuned; needed if the batch law is on.
        options: Groups and initial scales; None is `StandardConfig()`.

    Raises:
        ValueError: The batch law is on and lacks its numbers.
    """
    options = options or StandardConfig()
    rate = 1.0
    power = 0.0 if options.exponents is None else options.exponents.batch
    if power != 0.0:
        if budget is None:
            raise ValueError("parameterization.exponents.batch needs a budget: give one, or set 0")
        rate = laws.batch_factor(budget, base or BasePoint(), power, "standard")
    return Parameterization(
        model=model,
        roles=tuple((role, _row(role, model.num_layers, options, rate)) for role in ROLES),
    )


def _row(role: Role, num_layers: int, options: StandardConfig, rate: float) -> Hyperparameters:
    row = Hyperparameters(learning_rate_multiplier=rate, group=_group(role, options))
    match role:
        case "embedding":
            std = options.embedding_std
            return dataclasses.replace(
                row, init_std=std, fan_in_power=0.0, weight_decay_multiplier=0.0
            )
        case _ if ROLE_CLASSES[role] == "vectors":
            return dataclasses.replace(row, weight_decay_multiplier=0.0)
    if options.matrix_std is not None:
        return dataclasses.replace(row, init_std=options.matrix_std, fan_in_power=0.0)
    if role in ("attention_out", "mlp_out", "shared_out", "expert_out"):
        return dataclasses.replace(row, init_std=1.0 / math.sqrt(2 * num_layers))
    return row


def _group(role: Role, options: StandardConfig) -> Group:
    groups = OPTIMIZERS[options.matrices].role_groups
    if ROLE_CLASSES[role] in ("hidden", "experts", "router"):
        return groups.matrices
    return groups.head if role == "head" else "adamw"
