# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Names pairs of a parameterisation and an optimiser: the arms of `transfer`.

    standard                    one rate for every role, AdamW: the rate does not transfer
    hyperp                      as published: the radius of the head grows with width
    hyperp_bounded              the same, with one bound on the logits at every width
    mup_plus_plus_muon_tokens   Muon with HyperP's token law: separates the sphere from the law

The rate of an arm is the centre of its grid: the optimum at a small size, within about a factor of
two.

To add an arm: a row of ARMS in experiments/studies/transfer/arms.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxmoe.optim import AdamWConfig, MuonConfig, MuonHConfig, Optimizer
from jaxmoe.scaling import (
    CompletePConfig,
    DepthExponents,
    HyperPConfig,
    MuPConfig,
    MuPMuonConfig,
    MuPPlusPlusConfig,
    MuPPlusPlusMuonConfig,
    ParameterizationBase,
    StandardConfig,
    VanillaMuonHConfig,
)
from jaxmoe.scaling.laws import TOKEN_EXPONENT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A parameterisation and the optimiser that goes with it."""

    parameterization: ParameterizationBase
    optimizer: Optimizer
    claims: tuple[str, ...] = ()
    """Axes along which the arm claims to keep its rate."""

    @property
    def words(self) -> str:
        """Parameterisation and optimiser with their non-default options, and the centre of the
        rates."""
        rate = self.optimizer.learning_rate
        parts = "".join([self.parameterization.name, *_options(self.parameterization)])
        return f"{parts} with {self.optimizer.name}, rates round {rate:g}"


def _options(config: Any, prefix: str = " ") -> Iterator[str]:
    """Yield the options of a config, and of the records in it, that are not the default ones."""
    defaults = type(config)()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _options(value, f"{prefix}{field.name}.")
        elif value != getattr(defaults, field.name):
            yield f"{prefix}{field.name}={value:g}"


_ALL = ("width", "depth", "tokens", "batch", "granularity", "sparsity", "balance")
_PAPERS_BOUND = 20.48
"""HyperP's std of 0.02 times its base width of 1024."""

ARMS: dict[str, Arm] = {
    "standard": Arm(parameterization=StandardConfig(), optimizer=AdamWConfig(learning_rate=4e-3)),
    "mup": Arm(
        parameterization=MuPConfig(),
        optimizer=AdamWConfig(learning_rate=8e-3),
        claims=("width",),
    ),
    "mup_plus_plus": Arm(
        parameterization=MuPPlusPlusConfig(),
        optimizer=AdamWConfig(learning_rate=8e-3),
        claims=("width", "depth"),
    ),
    "completep": Arm(
        parameterization=CompletePConfig(),
        optimizer=AdamWConfig(learning_rate=8e-3),
        claims=("width", "depth"),
    ),
    "mup_muon": Arm(
        parameterization=MuPMuonConfig(),
        optimizer=MuonConfig(learning_rate=0.05),
        claims=("width",),
    ),
    "mup_plus_plus_muon": Arm(
        parameterization=MuPPlusPlusMuonConfig(),
        optimizer=MuonConfig(learning_rate=0.05),
        claims=("width", "depth"),
    ),
    "mup_plus_plus_muon_tokens": Arm(
        parameterization=MuPPlusPlusMuonConfig(exponents=DepthExponents(tokens=TOKEN_EXPONENT)),
        optimizer=MuonConfig(learning_rate=0.05),
        claims=("width", "depth", "tokens"),
    ),
    "muonh_vanilla": Arm(
        parameterization=VanillaMuonHConfig(),
        optimizer=MuonHConfig(learning_rate=0.1),
        claims=("width",),
    ),
    "hyperp": Arm(
        parameterization=HyperPConfig(), optimizer=MuonHConfig(learning_rate=0.1), claims=_ALL
    ),
    "hyperp_bounded": Arm(
        parameterization=HyperPConfig(logit_bound=_PAPERS_BOUND),
        optimizer=MuonHConfig(learning_rate=0.04),
        claims=_ALL,
    ),
}

DEFAULT_ARMS = ("standard", "hyperp_bounded")
"""Arms of a command line that names neither arms nor parts."""


def own_arm(parameterization: ParameterizationBase | None, optimizer: Optimizer | None) -> Arm:
    """Return an arm made from its parts.

    Args:
        parameterization: Parameterisation; standard when None.
        optimizer: Optimiser; that of the first arm with this parameterisation when None.
    """
    parameterization = parameterization or StandardConfig()
    kin = [a for a in ARMS.values() if a.parameterization.name == parameterization.name]
    if optimizer is None:
        optimizer = kin[0].optimizer if kin else AdamWConfig()
    claims = next((a.claims for a in kin if a.optimizer.name == optimizer.name), ())
    return Arm(parameterization=parameterization, optimizer=optimizer, claims=claims)
