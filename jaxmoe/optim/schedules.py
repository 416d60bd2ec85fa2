# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: pure functions of the optimiser's updates so far, in [floor, 1] times
the peak.

    linear   warm-up, then a straight line to the floor (HyperP: no warm-up, floor 0.1)
    cosine   warm-up, then half a cosine to the floor
    wsd      warm-up, stable, then a straight line to the floor over the last `decay_fraction`

The update after t others has the share t / steps of the fall of a run without warm-up, as in HyperP
(eta (1 - 0.9 t / t_max)): the first falls by nothing, and the floor is what an update after the
last would have. The decay of wsd over 2 updates has the factors 1 and (1 + floor) / 2. A refused
step is no update: the next one has its rate.

To add a schedule: a config in `jaxmoe/optim/schedules.py` that extends `ScheduleBase`, or
`WarmupDecay` and its `fall`, and its row under `schedule` in `jaxmoe/catalog/runs.py`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmoe.catalog import Registry

Schedule = Callable[[Array], Float[Array, ""]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleBase(abc.ABC):
    """Base class of schedules: warm-up, then a fall whose line ends at the floor after the last
    update."""

    name: ClassVar[str]
    """Key in the registry."""

    warmup_steps: int = 0
    """Number of warm-up steps."""
    floor: float
    """Learning rate over the peak at which the fall ends, after the last update."""

    def __post_init__(self):
        if self.warmup_steps < 0:
            raise ValueError(f"schedule.warmup_steps={self.warmup_steps} must be 0 or more")
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"schedule.floor={self.floor} must lie between 0 and 1")

    def build(self, steps: int) -> Schedule:
        """Return the factor by the number of updates before, for a run of `steps` of them."""
        if self.warmup_steps >= steps:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} must be at most {steps - 1}, below the"
                f" number of steps ({steps}): shorten the warm-up, or train longer (training.steps)"
            )
        first = self.first_fall(steps)

        def factor(step: Array) -> Float[Array, ""]:
            count = step.astype(jnp.float32)
            warmup = jnp.minimum(1.0, (count + 1.0) / max(self.warmup_steps, 1))
            progress = jnp.clip((count - first) / max(steps - first, 1), 0.0, 1.0)
            return warmup * self.fall(progress)

        return factor

    @abc.abstractmethod
    def fit(self, steps: int, fields: Collection[str] = ()) -> ScheduleBase:
        """Return the schedule with numbers of steps that fit a run; unchanged if they fit already.

        Args:
            steps: Total number of optimiser steps.
            fields: Names of fields that must stay as they are.
        """

    @abc.abstractmethod
    def first_fall(self, steps: int) -> int:
        """Return the first step of the fall."""

    @abc.abstractmethod
    def stable_step(self, steps: int) -> int | None:
        """Return the last step of a constant rate, from which a longer run can go on; None without
        one."""

    @abc.abstractmethod
    def fall(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """Return the factor at a share of the fall."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecay(ScheduleBase):
    """Base class of schedules that fall from the end of the warm-up on."""

    floor: float = 0.1
    """Learning rate over the peak at which the fall ends, after the last update."""

    def fit(self, steps: int, fields: Collection[str] = ()) -> WarmupDecay:
        """Return the schedule with a warm-up that fits a run; unchanged if it fits already."""
        if "warmup_steps" in fields or self.warmup_steps < steps:
            return self
        return dataclasses.replace(self, warmup_steps=steps // 5)

    def first_fall(self, steps: int) -> int:
        """Return the end of the warm-up."""
        del steps
        return self.warmup_steps

    def stable_step(self, steps: int) -> int | None:
        """Return None: the rate is never constant."""
        del steps
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearConfig(WarmupDecay):
    """Warm-up, then a straight line to the floor after the last update."""

    name: ClassVar[str] = "linear"

    def fall(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """Return the factor at a share of the fall."""
        return _line(self.floor, progress)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CosineConfig(WarmupDecay):
    """Warm-up, then half a cosine to the floor after the last update."""

    name: ClassVar[str] = "cosine"

    def fall(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """Return the factor at a share of the fall."""
        return self.floor + (1.0 - self.floor) * (0.5 * (1.0 + jnp.cos(jnp.pi * progress)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStableDecayConfig(ScheduleBase):
    """Warm-up, constant, then a straight line to the floor (WSD, arXiv 2404.06395)."""

    name: ClassVar[str] = "wsd"

    floor: float = 0.0
    """Learning rate over the peak at which the fall ends, after the last update."""
    decay_fraction: float = 0.2
    """Share of the steps, at the end, over which the rate falls."""

    def __post_init__(self):
        ScheduleBase.__post_init__(self)
        if not 0.0 < self.decay_fraction <= 1.0:
            raise ValueError(
                f"schedule.decay_fraction={self.decay_fraction} must lie above 0 and at most 1"
            )

    def fit(self, steps: int, fields: Collection[str] = ()) -> WarmupStableDecayConfig:
        """Return the schedule with a warm-up, or else a decay, that fits a run."""
        first = steps - round(self.decay_fraction * steps)
        if self.warmup_steps <= first and self.warmup_steps < steps:
            return self
        if "warmup_steps" not in fields:
            return dataclasses.replace(self, warmup_steps=min(steps // 5, first))
        if "decay_fraction" not in fields and self.warmup_steps < steps:
            return dataclasses.replace(self, decay_fraction=1 - self.warmup_steps / steps)
        return self

    def first_fall(self, steps: int) -> int:
        """Return the first step of the last `decay_fraction` of the steps."""
        first = steps - round(self.decay_fraction * steps)
        if first < self.warmup_steps:
            raise ValueError(
                f"schedule.warmup_steps={self.warmup_steps} must be at most {first}, the step at"
                f" which schedule.decay_fraction={self.decay_fraction} of {steps} steps begins:"
                f" set schedule.warmup_steps to {first} or less, or lower schedule.decay_fraction"
            )
        return first

    def stable_step(self, steps: int) -> int | None:
        """Return the last step before the decay."""
        return self.first_fall(steps) or None

    def fall(self, progress: Float[Array, ""]) -> Float[Array, ""]:
        """Return the factor at a share of the fall."""
        return _line(self.floor, progress)


def _line(floor: float, progress: Float[Array, ""]) -> Float[Array, ""]:
    """Return the factor on the straight line from 1 to the floor."""
    return 1.0 - (1.0 - floor) * progress


SCHEDULES = Registry("schedule")
