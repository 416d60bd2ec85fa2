# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The standard parameterisation: what most people mean by "the usual initialisation".

    matrices            normal, std 1 / sqrt(fan_in)
    into the residual   the same times 1 / sqrt(2 L), so that the stream does not grow with depth
    embedding           normal, std 0.02
    gains               1

One learning rate for every role, no forward multipliers, weight decay on matrices only. A learning
rate tuned here does not carry over to another width or depth: that is what HyperP is for.

Source: GPT-2 (Radford et al. 2019, section 2.3) for the residual factor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import ROLES, Hyperparameters, Role
from jaxmoe.scaling.budget import BasePoint, Budget
from jaxmoe.scaling.parameterization import Parameterization

EMBEDDING_STD = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StandardConfig:
    """Variance 1/fan_in, one learning rate for every role."""

    name: ClassVar[str] = "standard"

    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """See `standard`."""
        return standard(model, budget, base)


def standard(
    model: ModelConfig, budget: Budget | None = None, base: BasePoint | None = None
) -> Parameterization:
    """The standard parameterisation of a model.

    Args:
        model: returned unchanged.
        budget: not used: nothing here depends on tokens or batch.
        base: not used: nothing here is relative to a base point.
    """
    del budget, base
    return Parameterization(
        model=model,
        roles=tuple((role, _hyperparameters(role, model.num_layers)) for role in ROLES),
    )


def _hyperparameters(role: Role, num_layers: int) -> Hyperparameters:
    match role:
        case "embedding":
            return Hyperparameters(
                init_std=EMBEDDING_STD, fan_in_power=0.0, weight_decay_multiplier=0.0
            )
        case "norm" | "constant":
            return Hyperparameters(weight_decay_multiplier=0.0)
        case "attention_out" | "mlp_out" | "shared_out" | "expert_out":
            return Hyperparameters(init_std=1.0 / math.sqrt(2 * num_layers))
        case _:
            return Hyperparameters()
