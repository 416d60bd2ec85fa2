# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Record of what a scaling rule decides for a model."""

from __future__ import annotations

import dataclasses

from jaxmoe.declarations import Role
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import Hyperparameters


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
