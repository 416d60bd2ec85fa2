# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Token budget of a run, and the point at which hyperparameters were tuned."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

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
