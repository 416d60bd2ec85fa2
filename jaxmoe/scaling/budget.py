# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a run spends, and the point at which hyperparameters were tuned."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a run spends."""

    tokens: int
    """Training tokens of the whole run."""
    batch_tokens: int
    """Tokens of one optimiser step."""

    def __post_init__(self):
        if self.tokens < 1 or self.batch_tokens < 1:
            raise ValueError(
                f"a budget of {self.tokens} tokens in batches of {self.batch_tokens}: both must be"
                " at least 1"
            )

    @property
    def steps(self) -> int:
        """Optimiser steps, the last one included whole."""
        return -(-self.tokens // self.batch_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BasePoint:
    """Where the base learning rate was tuned (defaults: HyperP, arXiv 2603.28743, section 3)."""

    num_layers: int = 8
    """Depth."""
    embed_dim: int = 1024
    """Width."""
    tokens: int = 10_400_000_000
    """Training tokens."""
    batch_tokens: int = 2_097_152
    """Tokens of one step."""
