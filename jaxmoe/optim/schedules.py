# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: pure functions of the optimiser step, in [floor, 1] times the peak.

    linear   warm-up, then a straight line to the floor (HyperP: no warm-up, floor 0.1)
    cosine   warm-up, then half a cosine to the floor
    wsd      warm-up, stable, then a straight line to the floor over the last `decay_fraction`

To add a schedule: a config with `name` and `build(steps)`, and the union ScheduleConfig, in
`jaxmoe/optim/schedules.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.configs import registry_of

Schedule = Callable[[Array], Float[Array, ""]]


def _check(config: LinearConfig | CosineConfig | WarmupStableDecayConfig) -> None:
    if config.warmup_steps < 0:
        raise ValueError(f"schedule.warmup_steps={config.warmup_steps} must be 0 or more")
    if not 0.0 <= config.floor <= 1.0:
        raise ValueError(f"schedule.floor={config.floor} must lie between 0 and 1")


def _check_steps(warmup_steps: int, steps: int) -> None:
    if warmup_steps >= steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} must be below the number of steps ({steps}):"
            " shorten the warm-up, or train longer (training.steps)"
        )


def _warmup(step: Array, warmup_steps: int) -> Float[Array, ""]:
    return jnp.minimum(1.0, (step.astype(jnp.float32) + 1.0) / max(warmup_steps, 1))


def _progress(step: Array, first: int, last: int) -> Float[Array, ""]:
    """Return the share of the way from `first` (0) to `last` (1)."""
    return jnp.clip((step.astype(jnp.float32) - first) / max(last - first, 1), 0.0, 1.0)


def _falling(warmup_steps: int, first: int, last: int, floor: float) -> Schedule:
    """Return warm-up, then a straight line from `first` to the floor at `last`."""

    def factor(step: Array) -> Float[Array, ""]:
        fallen = _progress(step, first, last)
        return _warmup(step, warmup_steps) * (1.0 - (1.0 - floor) * fallen)

    return factor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig:
    """Warm-up, then a straight line to the floor at the last step."""

    name: ClassVar[str] = "linear"

    warmup_steps: int = 0
    """Number of warm-up steps."""
    floor: float = 0.1
    """Final learning rate over the peak."""

    __post_init__ = _check

    def build(self, steps: int) -> Schedule:
        """Return the factor by step for a run of `steps` steps."""
        _check_steps(self.warmup_steps, steps)
        return _falling(self.warmup_steps, self.warmup_steps, steps, self.floor)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CosineConfig:
    """Warm-up, then half a cosine to the floor at the last step."""

    name: ClassVar[str] = "cosine"

    warmup_steps: int = 0
    """Number of warm-up steps."""
    floor: float = 0.1
    """Final learning rate over the peak."""

    __post_init__ = _check

    def build(self, steps: int) -> Schedule:
        """Return the factor by step for a run of `steps` steps."""
        _check_steps(self.warmup_steps, steps)

        def factor(step: Array) -> Float[Array, ""]:
            half_cosine = 0.5 * (1.0 + jnp.cos(jnp.pi * _progress(step, self.warmup_steps, steps)))
            fallen = self.floor + (1.0 - self.floor) * half_cosine
            return _warmup(step, self.warmup_steps) * fallen

        return factor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStableDecayConfig:
    """Warm-up, constant, then a straight line to the floor (WSD, arXiv 2404.06395)."""

    name: ClassVar[str] = "wsd"

    warmup_steps: int = 0
    """Number of warm-up steps."""
    decay_fraction: float = 0.2
    """Share of the steps, at the end, over which the rate falls."""
    floor: float = 0.0
    """Final learning rate over the peak."""

    def __post_init__(self):
        _check(self)
        if not 0.0 < self.decay_fraction <= 1.0:
            raise ValueError(
                f"schedule.decay_fraction={self.decay_fraction} must lie above 0 and at most 1"
            )

    def build(self, steps: int) -> Schedule:
        """Return the factor by step for a run of `steps` steps."""
        _check_steps(self.warmup_steps, steps)
        first = steps - round(self.decay_fraction * steps)
        if first < self.warmup_steps:
            raise ValueError(
                f"schedule.decay_fraction={self.decay_fraction} of {steps} steps begins at step"
                f" {first}, before schedule.warmup_steps={self.warmup_steps} have passed:"
                f" set schedule.warmup_steps to {first} or less, or lower schedule.decay_fraction"
            )
        return _falling(self.warmup_steps, first, steps, self.floor)


ScheduleConfig = LinearConfig | CosineConfig | WarmupStableDecayConfig

SCHEDULES = registry_of(ScheduleConfig)
