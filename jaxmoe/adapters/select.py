# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Trains the model's own parameters of some roles, and freezes the others."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxmoe.adapters.base import Adapter, Layers, TargetsConfig, frozen, layers_of
from jaxmoe.declarations import ROLES, Role
from jaxmoe.parameters import ParameterTable
from sharding.rules import LogicalAxisRules

_ALL_BUT_ROUTERS: tuple[Role, ...] = tuple(role for role in ROLES if not role.startswith("router"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectConfig(Adapter):
    """Train some of the model's own parameters. By default all but the routers, which is the
    commonest way to fine-tune a Mixture-of-Experts model."""

    name: ClassVar[str] = "select"

    targets: TargetsConfig = TargetsConfig(roles=_ALL_BUT_ROUTERS)
    """Parameters that are trained; a frozen router is `roles` without router."""

    @property
    def words(self) -> str:
        """The adapter in words, for the header of a run."""
        return f"select {' '.join(self.targets.roles)}"

    def table(
        self, base: ParameterTable, rules: LogicalAxisRules, layers: Layers
    ) -> ParameterTable:
        """Return the table with the other rows frozen; see `Adapter.table`."""
        del rules
        rows = []
        for row in filter(self.targets.has, base):
            numbers = layers_of(row, layers)
            is_trained = self.targets.layers_in(numbers)
            if any(is_trained) and not all(is_trained):
                raise ValueError(
                    f"adapter.targets.layers={self.targets.layers} has some of the layers"
                    f" {', '.join(map(str, numbers))}, whose parameters are one array: name all"
                    f" or none"
                    " of them, or adapt them by adapter:lora"
                )
            if all(is_trained):
                rows.append(row)
        self.targets.check_found(rows, base)
        return ParameterTable(tuple(row if row in rows else frozen(row) for row in base))
