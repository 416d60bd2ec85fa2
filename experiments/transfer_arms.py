# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The arms of `transfer`: named pairs of parameterisation and optimiser.

    standard        one rate for every role, AdamW: what does not transfer
    mup_plus_plus_muon_tokens   Muon with HyperP's token law: separates the sphere from the law

The rate of an arm is the centre of its grid: where the optimum lies at a small size, within a
factor of two or so.

To add an arm: a row in _ARMS. It names parts of the registries, and is there as soon as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmoe.optim import OPTIMIZERS, AdamWConfig, OptimizerConfig
from jaxmoe.scaling import PARAMETERIZATIONS, ParameterizationConfig, StandardConfig

_TOKEN_EXPONENT = 0.32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A parameterisation with the optimiser that it is meant for."""

    parameterization: ParameterizationConfig
    optimizer: OptimizerConfig
    claims: tuple[str, ...] = ()
    """Axes over which its rate is said to stay."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    parameterization: str
    optimizer: str
    learning_rate: float
    claims: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    """Fields of the parameterisation that differ from its defaults."""
    weight_decay: float | None = None

    @property
    def exists(self) -> bool:
        return self.parameterization in PARAMETERIZATIONS and self.optimizer in OPTIMIZERS

    def build(self) -> Arm:
        changes: dict[str, Any] = {"learning_rate": self.learning_rate}
        if self.weight_decay is not None:
            changes["weight_decay"] = self.weight_decay
        return Arm(
            parameterization=PARAMETERIZATIONS[self.parameterization](**dict(self.options)),
            optimizer=OPTIMIZERS[self.optimizer](**changes),
            claims=self.claims,
        )


_ALL = ("width", "depth", "tokens", "batch", "granularity", "sparsity", "balance")
_ARMS = {
    "standard": _Row(parameterization="standard", optimizer="adamw", learning_rate=4e-3),
    "mup": _Row(parameterization="mup", optimizer="adamw", learning_rate=8e-3, claims=("width",)),
    "mup_plus_plus": _Row(
        parameterization="mup_plus_plus",
        optimizer="adamw",
        learning_rate=8e-3,
        claims=("width", "depth"),
    ),
    "completep": _Row(
        parameterization="completep",
        optimizer="adamw",
        learning_rate=8e-3,
        claims=("width", "depth"),
    ),
    "mup_muon": _Row(
        parameterization="mup_muon", optimizer="muon", learning_rate=0.05, claims=("width",)
    ),
    "mup_plus_plus_muon": _Row(
        parameterization="mup_plus_plus_muon",
        optimizer="muon",
        learning_rate=0.05,
        weight_decay=1e-3,
        claims=("width", "depth"),
    ),
    "mup_plus_plus_muon_tokens": _Row(
        parameterization="mup_plus_plus_muon",
        optimizer="muon",
        learning_rate=0.05,
        weight_decay=1e-3,
        options=(("token_exponent", _TOKEN_EXPONENT),),
        claims=("width", "depth", "tokens"),
    ),
    "muonh_vanilla": _Row(
        parameterization="muonh_vanilla", optimizer="muonh", learning_rate=0.1, claims=("width",)
    ),
    "hyperp": _Row(parameterization="hyperp", optimizer="muonh", learning_rate=0.1, claims=_ALL),
}
ARMS: dict[str, Arm] = {name: row.build() for name, row in _ARMS.items() if row.exists}

DEFAULT_ARMS = tuple(name for name in ("standard", "hyperp") if name in ARMS)
"""What a command line compares that names neither arms nor parts."""


def own_arm(
    parameterization: ParameterizationConfig | None, optimizer: OptimizerConfig | None
) -> Arm:
    """An arm from its parts.

    Args:
        parameterization: standard when None.
        optimizer: when None that of the arm above with this parameterisation.
    """
    parameterization = parameterization or StandardConfig()
    kin = [a for a in ARMS.values() if type(a.parameterization) is type(parameterization)]
    if optimizer is None:
        optimizer = kin[0].optimizer if kin else AdamWConfig()
    claims = next((a.claims for a in kin if type(a.optimizer) is type(optimizer)), ())
    return Arm(parameterization=parameterization, optimizer=optimizer, claims=claims)
