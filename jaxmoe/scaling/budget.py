# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run spends, and the point at which hyperparameters were tuned."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

BaseField = Literal["num_layers", "embed_dim", "tokens", "batch_tokens"]
BASE_FIELDS: Final[tuple[BaseField, ...]] = ("num_layers", "embed_dim", "tokens", "batch_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a run spends."""

    tokens: int
    """Training tokens of the whole run."""
    batch_tokens: int
    """Tokens of one optimiser step."""

    def __post_init__(self):
        for field, of_what in (("tokens", "the whole run"), ("batch_tokens", "one step")):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"budget.{field}={getattr(self, field)} must be at least 1: the laws of a"
                    f" learning rate divide by it; give the tokens of {of_what}"
                )

    @property
    def steps(self) -> int:
        """Optimiser steps, the last one included whole."""
        return -(-self.tokens // self.batch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BasePoint:
    """Where the base learning rate was tuned. A rule that needs a number asks for it."""

    num_layers: int | None = None
    """Depth."""
    embed_dim: int | None = None
    """Width."""
    tokens: int | None = None
    """Training tokens of the whole run."""
    batch_tokens: int | None = None
    """Tokens of one step."""

    def __post_init__(self):
        for field in BASE_FIELDS:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"base.{field}={value} must be at least 1")

    def number(self, field: BaseField, rule: str) -> int:
        """One of the numbers, for a rule that cannot do without it.

        Args:
            field: which.
            rule: the parameterisation that asks, for the error.

        Raises:
            ValueError: it is not given.
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
"""The paper's (arXiv 2603.28743, section 3): depth 8, 50 tokens per parameter, 2^21 a step."""
