# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of scaling rules, and the record of what one decides for a model."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

from jaxmoe.declarations import Role
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import Hyperparameters
from jaxmoe.scaling.budget import BasePoint, Budget


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parameterization:
    """Model with its forward multipliers filled in, and the hyperparameters of each role."""

    model: ModelConfig
    roles: tuple[tuple[Role, Hyperparameters], ...]

    def __post_init__(self):
        names = [role for role, _ in self.roles]
        if twice := sorted({role for role in names if names.count(role) > 1}):
            raise ValueError(
                f"the parameterisation names the role {twice[0]!r} twice in `roles`: a parameter"
                " follows one rule, so keep one of the two"
            )

    def of(self, role: Role) -> Hyperparameters:
        """Return the hyperparameters of one role.

        Raises:
            ValueError: The parameterisation has no row for it.
        """
        table = dict(self.roles)
        if role not in table:
            raise ValueError(
                f"the parameterisation has no row for the role {role!r}: add it to its `roles`"
                f" (it has {', '.join(table)})"
            )
        return table[role]


class ParameterizationBase(abc.ABC):
    """Base class of the configs of parameterisations."""

    __slots__ = ()

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """Name in the registry and on the command line."""

    @abc.abstractmethod
    def build(self, model: ModelConfig, budget: Budget, base: BasePoint) -> Parameterization:
        """Return the hyperparameters of each role, and the model with its multipliers.

        Args:
            model: Model.
            budget: Tokens and batch of the run.
            base: Point at which the learning rate was tuned.
        """
