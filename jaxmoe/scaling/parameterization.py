# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Parameterization`: what a scaling rule decides about a model, as data."""

from __future__ import annotations

import dataclasses

from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import Hyperparameters, Role


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parameterization:
    """A model with its forward multipliers filled in, and the hyperparameters of each role."""

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
        """Hyperparameters of one role.

        Raises:
            ValueError: the parameterisation says nothing of it.
        """
        table = dict(self.roles)
        if role not in table:
            raise ValueError(
                f"the parameterisation says nothing of the role {role!r}: add it to its `roles`"
                f" (it knows {', '.join(table)})"
            )
        return table[role]
