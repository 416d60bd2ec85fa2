# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Ramps the batch size up: it doubles, stage by stage, to the full size.

    rows(stage i of n) = batch_size / 2^(n - i)          n equal stages in the first steps, then all
    learning rate      times (rows / batch_size)^exponent meanwhile

Small batches give more steps for the same tokens early in training. The stages divide the first
`fraction` of the optimiser steps, not of the tokens: the number of steps (`training.steps`, to
which schedules and checkpoints refer) does not change, and the run reads fewer tokens. ArchScale
ramps over 5 % of the tokens. Micro-batches keep their size and there are fewer of them; a batch
smaller than one micro-batch is one micro-batch. Every batch size is compiled once, at the start.

Source of the law of the learning rate: `jaxmoe/scaling/laws.py` (exponent 0.5, measured over 2^18
to 2^21 tokens a step, between runs and not within one).

To add another shape of ramp: return other `BatchSizes` from `build` in
`jaxmoe/training/batch_ramp.py`.
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
    """Share of the steps, at the start, with smaller batches."""
    stages: int = 3
    """Number of smaller sizes, each half of the next."""
    exponent: float = 0.5
    """Exponent of (batch / full batch), by which the learning rate is multiplied; 0 disables it."""

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
        """Return the rows of each step.

        Args:
            steps: Steps of the whole run.
            batch_size: Rows of a step after the ramp.

        Raises:
            ValueError: The batch cannot be halved so often, or there are fewer steps than stages.
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
                f" {round(self.fraction * steps)} steps, and must be at least {self.stages}, one"
                " for each of its stages: choose a larger fraction or fewer stages"
            )
        small = [(i * length, batch_size >> (self.stages - i)) for i in range(self.stages)]
        return BatchSizes((*small, (self.stages * length, batch_size)))

    def scale_schedule(self, schedule: Schedule, sizes: BatchSizes) -> Schedule:
        """Return the schedule multiplied by the law of the batch size.

        Args:
            schedule: Schedule of the run without a ramp.
            sizes: Result of `build`.
        """
        _, full = sizes.stages[-1]

        def factor(step: Array) -> Float[Array, ""]:
            law = jnp.float32(1.0)
            for first, rows in sizes.stages:
                law = jnp.where(step >= first, jnp.float32((rows / full) ** self.exponent), law)
            return schedule(step) * law

        return factor
