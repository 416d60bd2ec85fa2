# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Base class of scaling rules, and the record of what one decides for a model."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Final, Literal

from jaxmoe.declarations import Role
from jaxmoe.models.config import ModelConfig
from jaxmoe.parameters import Hyperparameters

BaseField = Literal["num_layers", "embed_dim", "tokens", "batch_tokens"]
BASE_FIELDS: Final[tuple[BaseField, ...]] = ("num_layers", "embed_dim", "tokens", "batch_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Tokens of a run and of a step."""

    tokens: int
    """Training tokens of the whole run."""
    batch_tokens: int
    """Tokens per optimiser step."""

    def __post_init__(self):
        for field, of_what in (("tokens", "the whole run"), ("batch_tokens", "one step")):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"budget.{field}={getattr(self, field)} must be at least 1: the laws of a"
                    f" learning rate divide by it; give the tokens of {of_what}"
                )

    @property
    def steps(self) -> int:
        """Number of optimiser steps, rounded up."""
        return -(-self.tokens // self.batch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BasePoint:
    """Point at which the base learning rate was tuned; rules need some of its numbers."""

    num_layers: int | None = None
    """Number of layers of the tuned model."""
    embed_dim: int | None = None
    """Width of the tuned model."""
    tokens: int | None = None
    """Training tokens of the whole run."""
    batch_tokens: int | None = None
    """Tokens per optimiser step of the tuned run."""

    def __post_init__(self):
        for field in BASE_FIELDS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"base.{field}={value} must be at least 1")

    def number(self, field: BaseField, rule: str) -> int:
        """Return one of the numbers.

        Args:
            field: Name of the number.
            rule: Name of the parameterisation, for the error.

        Raises:
            ValueError: The number is None.
        """
        value = getattr(self, field)
        if value is None:
            raise ValueError(
                f"base.{field} is missing: {rule} carries a learning rate from the point where it"
                f" was tuned; give --base.{field} N ({getattr(HYPERP_BASE, field)} in HyperP's"
                " paper)"
            )
        return value


HYPERP_BASE = BasePoint(num_layers=8, embed_dim=1024, tokens=10_400_000_000, batch_tokens=2_097_152)
"""Base point of HyperP (arXiv 2603.28743, section 3): 50 tokens per parameter."""


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
