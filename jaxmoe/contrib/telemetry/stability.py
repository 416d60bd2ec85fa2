# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Is an indicator of instability bounded over training, and does it not grow with size?

    peak        largest value over training
    plateau     median of the last tenth
    bounded     peak / plateau < 2, and no upward trend in the last half
    trend       of the straight line of least squares through the last half: upward if it rises by
                more than 5% of the plateau, and by more than three of its own standard errors
    not growing plateau(next size) <= 1.05 plateau(size), for sizes in rising order

HyperP (arXiv 2603.28743, section 4) claims that its indicators are bounded and do not grow, and
gives no test; this one is ours. It is meant for numbers that are not negative.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MOST_PEAK = 2.0
MOST_RISE = 0.05
MOST_GROWTH = 1.05
STANDARD_ERRORS = 3.0
FEWEST = 20
"""Smallest number of values that can be judged."""
JUDGED = (
    "attention_z",
    "attention_max_logit",
    "router_z",
    "router_max_logit",
    "attention_rms_scaled",
    "feed_forward_rms_scaled",
    "attention_outliers",
    "feed_forward_outliers",
    "head_z",
)
"""Indicators that HyperP's claim is about, and the largest logits."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StabilityVerdict:
    """Whether a claim holds (None if it cannot be judged), and the numbers as text."""

    holds: bool | None
    explanation: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Statistics of one series over training."""

    peak: float
    plateau: float
    rise: float
    """Rise of the line fitted to the last half, from its beginning to its end, over the plateau."""
    error: float
    """Standard error of `rise`."""

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> Course:
        """Return the statistics of the values of an indicator, in the order of the steps.

        Raises:
            ValueError: too few of them, a negative one, or one that is not finite.
        """
        series = np.asarray(values, np.float64)
        if series.ndim != 1 or len(series) < FEWEST:
            raise ValueError(
                f"a series of {series.size} values is too short to be judged: {FEWEST} at least"
            )
        if not np.isfinite(series).all() or (series < 0.0).any():
            raise ValueError("a series to be judged must be finite and not negative")
        plateau = float(np.median(series[-max(len(series) // 10, 2) :]))
        half = series[len(series) // 2 :]
        x = np.arange(len(half)) / (len(half) - 1) - 0.5
        slope = float(x @ half / (x @ x))
        residuals = half - half.mean() - slope * x
        error = math.sqrt(float(residuals @ residuals) / (len(half) - 2) / float(x @ x))
        scale = plateau if plateau > 0.0 else 1.0
        return cls(
            peak=float(series.max()), plateau=plateau, rise=slope / scale, error=error / scale
        )

    @property
    def ratio(self) -> float:
        """Peak over plateau; 1 for a series of zeros."""
        if self.plateau > 0.0:
            return self.peak / self.plateau
        return 1.0 if self.peak == 0.0 else math.inf


def is_bounded(values: Sequence[float] | np.ndarray) -> StabilityVerdict:
    """Return whether an indicator stays bounded over training.

    Args:
        values: in the order of the steps, at least `FEWEST`.

    Raises:
        ValueError: as from `Course.of`.
    """
    course = Course.of(values)
    has_peak = course.ratio >= MOST_PEAK
    rises = course.rise > max(MOST_RISE, STANDARD_ERRORS * course.error)
    sentence = (
        f"peak {course.peak:.4g}, plateau {course.plateau:.4g} (ratio {course.ratio:.2f}, must be"
        f" below {MOST_PEAK:g}); last half {course.rise:+.1%} +- {course.error:.1%}"
        f" ({'rises' if rises else 'does not rise'})"
    )
    return StabilityVerdict(holds=not has_peak and not rises, explanation=sentence)


def is_non_increasing(series: Mapping[str, Sequence[float] | np.ndarray]) -> StabilityVerdict:
    """Return whether the plateau of an indicator does not grow with the size of the model.

    Args:
        series: values over training by the name of the size, in rising order.

    Raises:
        ValueError: fewer than two sizes, or as from `Course.of`.
    """
    if len(series) < 2:
        raise ValueError(f"{len(series)} size cannot be compared: give at least two")
    plateaus = {name: Course.of(values).plateau for name, values in series.items()}
    names = list(plateaus)
    grown = [
        f"{small} to {large}"
        for small, large in zip(names, names[1:], strict=False)
        if plateaus[large] > MOST_GROWTH * plateaus[small]
    ]
    sentence = "plateaus " + ", ".join(f"{name}: {value:.4g}" for name, value in plateaus.items())
    sentence += f"; grows from {', '.join(grown)}" if grown else "; does not grow"
    return StabilityVerdict(holds=not grown, explanation=sentence)


def judge_run(series: Mapping[str, np.ndarray]) -> dict[str, StabilityVerdict]:
    """Return the verdicts on the indicators of a run.

    Args:
        series: values over training by indicator, layers taken together.
    """
    return {name: _verdict(is_bounded, series[name]) for name in JUDGED if name in series}


def judge_sizes(
    series_of_run: Mapping[str, Mapping[str, np.ndarray]],
) -> dict[str, StabilityVerdict]:
    """Return the verdicts on the indicators that runs of several sizes have.

    Args:
        series_of_run: values over training by indicator, layers taken together, by the name of the
            run, in rising order of size.
    """
    shared = (name for name in JUDGED if all(name in series for series in series_of_run.values()))
    return {
        name: _verdict(
            is_non_increasing, {run: series[name] for run, series in series_of_run.items()}
        )
        for name in shared
    }


def _verdict(judge: Callable[[Any], StabilityVerdict], values: Any) -> StabilityVerdict:
    try:
        return judge(values)
    except ValueError as error:
        return StabilityVerdict(holds=None, explanation=str(error))
