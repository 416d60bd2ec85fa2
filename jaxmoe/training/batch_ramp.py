# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Small batches at first: the batch doubles, stage by stage, up to the run's own.

    rows(stage i of n) = batch_size / 2^(n - i)          n equal stages in the first steps, then all
    learning rate      times (rows / batch_size)^exponent meanwhile

A small batch makes more steps of the same tokens while the gradient is still plain to see. The
stages divide the first `fraction` of the optimiser steps, not of the tokens: the number of steps
(`training.steps`, to which schedules and checkpoints refer) stays, and the run reads fewer tokens.
ArchScale's ramp is 5 % of the tokens. A micro-batch keeps its size and there are fewer of them; a
batch smaller than one is a micro-batch by itself. Every size of batch is compiled once, at the
start.

Source of the rate's law: `jaxmoe.scaling.laws` (exponent 0.5, measured over 2^18 to 2^21 tokens a
step, between runs and not within one).

To add another shape of ramp: `build` returns any `BatchSizes`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.data.batch_sizes import BatchSizes
from jaxmoe.optim.schedules import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampConfig:
    """Smaller batches in the first steps."""

    fraction: float = 0.05
    """Share of the steps, at the start, that have smaller batches."""
    stages: int = 3
    """Sizes before the full one, each half of the next."""
    exponent: float = 0.5
    """The learning rate is multiplied by (batch / full batch) to this power; 0: it is not."""

    def __post_init__(self):
        if not 0.0 < self.fraction < 1.0:
            raise ValueError(
                f"training.batch_ramp.fraction={self.fraction} must lie between 0 and 1"
            )
        if self.stages < 1:
            raise ValueError(f"training.batch_ramp.stages={self.stages} must be at least 1")
        if not 0.0 <= self.exponent <= 1.0:
            raise ValueError(
                f"training.batch_ramp.exponent={self.exponent} must lie between 0 and 1"
            )

    def build(self, steps: int, batch_size: int) -> BatchSizes:
        """The rows of each step.

        Args:
            steps: of the whole run.
            batch_size: rows of a step after the ramp.

        Raises:
            ValueError: a batch that cannot be halved so often, or fewer steps than stages.
        """
        if batch_size % 2**self.stages:
            raise ValueError(
                f"training.batch_ramp.stages={self.stages} halves training.batch_size={batch_size}"
                f" {self.stages} times, which leaves no whole number: choose a batch size that is a"
                f" multiple of {2**self.stages}, or fewer stages"
            )
        length = round(self.fraction * steps) // self.stages
        if length < 1:
            raise ValueError(
                f"training.batch_ramp.fraction={self.fraction} of training.steps={steps} is"
                f" {round(self.fraction * steps)} steps, too few for {self.stages} stages: choose a"
                " larger fraction or fewer stages"
            )
        small = [(i * length, batch_size >> (self.stages - i)) for i in range(self.stages)]
        return BatchSizes((*small, (self.stages * length, batch_size)))

    def scaled(self, schedule: Schedule, sizes: BatchSizes) -> Schedule:
        """The schedule with the law of the batch.

        Args:
            schedule: of the run without a ramp.
            sizes: from `build`.
        """
        _, full = sizes.stages[-1]

        def factor(step: Array) -> Float[Array, ""]:
            law = jnp.float32(1.0)
            for first, rows in sizes.stages:
                law = jnp.where(step >= first, jnp.float32((rows / full) ** self.exponent), law)
            return schedule(step) * law

        return factor


def accumulation_of(rows: int, batch_size: int, accumulation: int) -> int:
    """Micro-batches of a batch of `rows`, none larger than those of a full batch."""
    return -(-accumulation * rows // batch_size)
