# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Fits the best rate at a point, its shift along an axis, and the cost of the shift.

    loss(x) = c + b (x - x*)^2,  x = log2 rate        through the rates within a factor of two of
                                                      the best one, at least its neighbours
    shift    = x*(largest) - x*(smallest)             factor-of-two steps
    exponent = slope of x* over log2(value)           least squares
    regret   = loss(x*(smallest)) - loss(x*) at the largest point

A best rate that is the first or the last of its grid is reported as a bound, and nothing is
extrapolated from it. Rates at which a run diverged have no loss.

Intervals, 95%: bootstrap over the residuals of rate and seed within a point. Seeds are paired: what
a seed adds to every rate does not move the optimum. The rest,
    e = loss - mean of the rate - mean of the seed + mean,
is resampled for every rate and seed. With few seeds residuals are too small and a percentile is
too narrow: e is scaled by sqrt(R S / ((R-1)(S-1))) and by Student's quantile over the normal one,
(R-1)(S-1) degrees of freedom. One seed has no interval.

Source: the log-quadratic fit of arXiv 2603.28743, section 4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from experiments.cli.tables import student

Edge = Literal["lowest", "highest", "divergence"]
"""Places where a best rate is no optimum: at an end of the grid, or beside rates that diverge."""
Interval = tuple[float, float]

REPLICATES = 2000
_NORMAL = 1.96
_WINDOW = 1.0 + 1e-6
"""Factor-of-two steps to either side of the best rate that enter the fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Held-out loss at one point by rate and seed."""

    rates: tuple[float, ...]
    """Rates, rising."""
    losses: np.ndarray
    """Losses [R seeds]; NaN where a trial diverged."""

    def __post_init__(self):
        if self.losses.shape[0] != len(self.rates) or self.losses.ndim != 2:
            raise ValueError(f"{len(self.rates)} rates but losses of shape {self.losses.shape}")

    @property
    def diverged_rates(self) -> tuple[float, ...]:
        """Rates at which a seed diverged."""
        rows = zip(self.rates, self.losses, strict=True)
        return tuple(rate for rate, row in rows if not np.isfinite(row).all())

    @property
    def known_losses(self) -> tuple[np.ndarray, np.ndarray]:
        """log2 of the rates whose seeds all finished, and their losses [r seeds]."""
        is_finite = np.isfinite(self.losses).all(1)
        return np.log2(np.asarray(self.rates)[is_finite]), self.losses[is_finite]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimum:
    """The best rate at a point."""

    rate: float
    loss: float
    edge: Edge | None
    """Edge of the grid that the rate is at; None for an optimum inside the grid."""
    interval: Interval | None
    """95% interval of the rate."""


def find_optimum(curve: Curve, draws: np.ndarray | None = None) -> Optimum | None:
    """Return the vertex of the parabola around the best rate.

    Args:
        curve: Losses of the point.
        draws: Result of `replicate`, for the interval.

    Returns:
        None where fewer than three rates finished.
    """
    x, losses = curve.known_losses
    if len(x) < 3:
        return None
    mean = losses.mean(1)
    best = int(mean.argmin())
    place, loss = _vertex(x, mean)
    edge: Edge | None = None
    if best == 0:
        edge = "lowest"
    elif best == len(x) - 1:
        edge = "divergence" if any(r > 2 ** x[-1] for r in curve.diverged_rates) else "highest"
    interval = None
    if draws is not None:
        low, high = np.percentile(_vertices(x, draws)[0], (2.5, 97.5))
        interval = (2.0**low, 2.0**high)
    return Optimum(rate=float(2.0**place), loss=float(loss), edge=edge, interval=interval)


def _vertex(x: np.ndarray, mean: np.ndarray) -> tuple[float, float]:
    """Return place and loss of the minimum of one curve."""
    places, losses = _vertices(x, mean[None])
    return float(places[0]), float(losses[0])


def _vertices(x: np.ndarray, means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places and losses of the minima of curves [n r]; at an edge those of the edge.

    A minimum is kept between the neighbours of the best rate: only a parabola through five rates or
    more could leave them.
    """
    best = means.argmin(1)
    places = x[best].astype(float)
    losses = means.min(1)
    for index in set(best.tolist()) - {0, len(x) - 1}:  # rows of one window are one fit
        rows = np.flatnonzero(best == index)
        offset = x - x[index]
        near = _near(x, index)
        a, b, c = np.polyfit(offset[near], means[rows][:, near].T, 2)
        is_convex = a > 0.0
        a = a[is_convex]
        b = b[is_convex]
        c = c[is_convex]
        rows = rows[is_convex]
        place = np.clip(-b / (2 * a), offset[index - 1], offset[index + 1])
        places[rows], losses[rows] = x[index] + place, a * place**2 + b * place + c
    return places, losses


def _near(x: np.ndarray, index: int) -> np.ndarray:
    """Return which rates the parabola around one of them goes through."""
    near = np.abs(x - x[index]) <= _WINDOW
    near[index - 1 : index + 2] = True
    return near


def loss_at(curve_x: np.ndarray, mean: np.ndarray, place: float) -> float | None:
    """Return the loss of a curve between its rates; None outside them.

    Near the best rate it is read from the parabola, elsewhere from lines, which lie above a
    convex curve: a regret is overestimated rather than underestimated.
    """
    if not curve_x[0] <= place <= curve_x[-1]:
        return None
    best = int(mean.argmin())
    line = float(np.interp(place, curve_x, mean))
    if best in (0, len(curve_x) - 1):
        return line
    low = curve_x[best - 1]
    high = curve_x[best + 1]
    if not low <= place <= high:
        return line
    near = _near(curve_x, best)
    parabola = np.polyfit(curve_x[near] - curve_x[best], mean[near], 2)
    return float(np.polyval(parabola, place - curve_x[best]))


def replicate(curve: Curve, random: np.random.Generator) -> np.ndarray | None:
    """Return bootstrap replicates of the mean loss by rate, [replicates r]; None for one seed."""
    x, losses = curve.known_losses
    rates, seeds = losses.shape
    if seeds < 2 or rates < 3:
        return None
    mean = losses.mean(1)
    best = int(mean.argmin())
    # Residuals grow towards divergence; those near the optimum move it.
    first = min(max(best - 2, 0), rates - 3)
    near = losses[first : max(best + 3, first + 3)]
    residuals = near - near.mean(1, keepdims=True) - near.mean(0) + near.mean()
    number = near.shape[0]
    degrees = (number - 1) * (seeds - 1)
    scale = math.sqrt(number * seeds / degrees) * student(degrees) / _NORMAL
    drawn = random.choice(residuals.ravel(), (REPLICATES, rates, seeds)) * scale
    return mean + drawn.mean(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Shift of the best rate along an axis."""

    optima: dict[float, Optimum]
    """Optima by value; points with fewer than three rates are missing."""
    shift: float | None
    """Factor-of-two steps from the smallest to the largest point."""
    shift_bound: Literal["exact", "at least", "unknown"]
    """Whether `shift` is exact, a bound on its size, or unknown (an edge on the wrong side)."""
    shift_interval: Interval | None
    """95% interval of the shift or of its bound; None where it is unknown."""
    exponent: float | None
    exponent_interval: Interval | None
    regret: float | None
    """Cost of the smallest point's best rate at the largest point; None outside the rates there."""
    regret_interval: Interval | None

    @property
    def verdict(self) -> Literal["transfers", "does not transfer", "undecided"]:
        """Whether the shift is at most one factor-of-two step."""
        if self.shift is None or self.shift_bound == "unknown":
            return "undecided"
        if abs(self.shift) > 1.0:
            return "does not transfer"
        return "transfers" if self.shift_bound == "exact" else "undecided"


def fit_transfer(curves: Mapping[float, Curve], *, seed: int = 0) -> Transfer:
    """Fit one arm.

    Args:
        curves: Losses by value of the axis, at least two.
        seed: Seed of the bootstrap.
    """
    random = np.random.default_rng(seed)
    values = sorted(curves)
    draws = {value: replicate(curves[value], random) for value in values}
    by_value = {value: find_optimum(curves[value], draws[value]) for value in values}
    optima = {value: optimum for value, optimum in by_value.items() if optimum is not None}
    first = optima.get(values[0])
    last = optima.get(values[-1])
    shift = None
    bound = "unknown"
    if first is not None and last is not None:
        shift, bound = _shift(first, last)
    places = {  # of the replicates, by value
        value: _vertices(curves[value].known_losses[0], rows)[0]
        for value, rows in draws.items()
        if rows is not None and value in optima
    }
    ends = (values[0], values[-1])
    has_ends = bound != "unknown" and all(value in places for value in ends)
    inside = [value for value, optimum in optima.items() if optimum.edge is None]
    slope = _slope(inside, [math.log2(optima[value].rate) for value in inside])
    exponents = None
    if slope is not None and all(value in places for value in inside):
        rows = np.stack([places[value] for value in inside])
        exponents = np.polyfit(np.log2(inside), rows, 1)[0]
    regret, regrets = _regrets(curves[values[-1]], first, draws[values[-1]], places.get(values[0]))
    return Transfer(
        optima=optima,
        shift=shift,
        shift_bound=bound,
        shift_interval=_percentiles(places[ends[1]] - places[ends[0]]) if has_ends else None,
        exponent=slope,
        exponent_interval=_percentiles(exponents),
        regret=regret,
        regret_interval=_percentiles(regrets),
    )


def _shift(first: Optimum, last: Optimum) -> tuple[float, Literal["exact", "at least", "unknown"]]:
    """Return the shift, and whether an edge makes it a bound."""
    shift = math.log2(last.rate / first.rate)
    # Direction in which each optimum may lie beyond its rate; 0: neither.
    beyond = {None: 0, "lowest": -1, "highest": 1, "divergence": 1}
    # An optimum further down at the small point moves the shift up.
    changes = {beyond[last.edge], -beyond[first.edge]} - {0}
    if not changes:
        return shift, "exact"
    if len(changes) == 2 or shift == 0.0 or math.copysign(1, shift) not in changes:
        return shift, "unknown"
    return shift, "at least"


def _slope(values: Sequence[float], places: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(np.polyfit(np.log2(values), places, 1)[0])


def _regrets(
    curve: Curve, first: Optimum | None, draws: np.ndarray | None, places: np.ndarray | None
) -> tuple[float | None, list[float] | None]:
    """Return the regret and its replicates at the largest point."""
    x, losses = curve.known_losses
    if first is None or len(x) < 3:
        return None, None

    def regret(mean: np.ndarray, place: float) -> float | None:
        loss = loss_at(x, mean, place)
        return None if loss is None else max(0.0, loss - _vertex(x, mean)[1])

    value = regret(losses.mean(1), math.log2(first.rate))
    if value is None or draws is None or places is None:
        return value, None
    all_of_them = [regret(row, place) for row, place in zip(draws, places, strict=True)]
    return value, [r for r in all_of_them if r is not None]


def _percentiles(values: Sequence[float] | np.ndarray | None) -> Interval | None:
    if values is None or not len(values):
        return None
    low, high = np.percentile(np.asarray(values, float), (2.5, 97.5))
    return float(low), float(high)
