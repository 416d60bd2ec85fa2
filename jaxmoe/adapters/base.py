# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Defines what every adapter has: the table of the adapted model, and its targets."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
from collections.abc import Sequence
from typing import ClassVar

from jaxmoe.declarations import Role
from jaxmoe.parameters import FROZEN, ParameterSpec, ParameterTable
from sharding.rules import LogicalAxisRules


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TargetsConfig:
    """Parameters of the model that an adapter is for."""

    roles: tuple[Role, ...] = ("attention_in", "attention_out")
    """Roles of the parameters, as `describe` lists them: attention_in, attention_out, mlp_in,
    mlp_out, shared_in, shared_out, expert_in, expert_out, router, norm, embedding, head."""
    layers: tuple[int, ...] = ()
    """Numbers of the layers, from 0; all when empty."""
    pattern: str | None = None
    """Pattern of the paths, with * and ?, beside the roles; all when None."""

    def __post_init__(self):
        if not self.roles:
            raise ValueError("adapter.targets.roles is empty: name a role, such as attention_in")

    def layers_in(self, own: tuple[int, ...]) -> list[bool]:
        """Return which layers of a parameter are among the targets; of one outside of layers,
        whether it is.

        Args:
            own: Numbers of the layers of the parameter; empty outside of layers.
        """
        return [not self.layers or layer in self.layers for layer in own] or [not self.layers]

    def has(self, row: ParameterSpec) -> bool:
        """Return whether a parameter is among the targets, whatever its layer."""
        is_named = self.pattern is None or fnmatch.fnmatchcase(row.path, self.pattern)
        return is_named and row.declaration.role in self.roles

    def check_found(self, found: Sequence[ParameterSpec], base: ParameterTable) -> None:
        """Refuse targets that the model does not have.

        Args:
            found: Parameters among the targets.
            base: Parameters of the model.

        Raises:
            ValueError: There are none.
        """
        if not found:
            roles = sorted({row.declaration.role for row in base})
            pattern = "" if self.pattern is None else f" with a path like {self.pattern!r}"
            raise ValueError(
                f"adapter.targets.roles={self.roles}: the model has no such parameter{pattern}:"
                f" its roles are {', '.join(roles)}"
            )


class Adapter(abc.ABC):
    """Base class of the configs of adapters."""

    __slots__ = ()

    name: ClassVar[str]
    """Key in the registry."""
    has_factors: ClassVar[bool] = False
    """Whether it adds products of two factors to matrices, all with ranks and scales as
    `LoraConfig` has them."""
    has_mixing: ClassVar[bool] = False
    """Whether it makes several additions to a matrix and mixes them for each token; it is then a
    `jaxmoe.layers.mixing.Mixing`."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """The adapter in words, for the header of a run."""

    @abc.abstractmethod
    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the parameter table of the adapted model.

        Args:
            base: Table of the model without an adapter.
            rules: Logical to mesh axes.
            layers: Numbers of the layers of each stack, by the path of the stack.

        Raises:
            ValueError: The model has none of the targets.
        """


Layers = tuple[tuple[str, tuple[int, ...]], ...]
"""Pairs (path of a stack of layers, numbers of its layers)."""


def layers_of(row: ParameterSpec, layers: Layers) -> tuple[int, ...]:
    """Return the numbers of the layers of a stacked parameter; empty outside of layers."""
    return next((own for path, own in layers if row.path.startswith(f"{path}/")), ())


def frozen(row: ParameterSpec) -> ParameterSpec:
    """Return the row of a parameter that is not trained."""
    return dataclasses.replace(row, hyper=dataclasses.replace(row.hyper, group=FROZEN))
