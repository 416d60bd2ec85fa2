# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records indicators of layers and the congestion of routers over a run.

    indicators.npz  <name>[n, l] = the indicator at steps[n] in layer l; NaN where a layer does not
                    have it (`indicators.py` and `step.py`)
    congestion.npz  gamma_eff[n, l] fitted to the loads of the steps up to steps[n] in layer l, and
                    gamma_eff_low[n, l], gamma_eff_high: bootstrap interval over these steps

gamma_eff is estimated every `EVERY` steps, from loads and mean log probabilities that the steps
compute anyway: no pass of the model is added. The fit is in `congestion.py`.

    surge           up to the largest gamma_eff
    stabilization   as long as the interval reaches up to that of the largest
    relaxation      from then to the end

Source: arXiv 2604.04230, of which only the abstract was available: it names the three phases; where
they begin and end is our reading.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.contrib.telemetry.congestion import EVERY, fit_congestion
from jaxmoe.tracking.history import HistoryRecorder

INDICATORS = "indicators.npz"
CONGESTION = "congestion.npz"
PREFIX = "indicators/"
"""Prefix of the means over layers among the metrics of a run."""


class IndicatorRecorder(HistoryRecorder):
    """Keeps the indicators of every layer and saves them on request."""

    def record(self, step: int, indicators: Mapping[str, Any]) -> None:
        """Add the indicators of a step.

        Args:
            step: Optimiser steps done.
            indicators: [L] by name; none is no record.
        """
        if indicators:
            self.add(step, indicators)


def over_layers(name: str, values: np.ndarray) -> np.ndarray:
    """Return one number for all layers: the largest maximum, the mean of anything else.

    Args:
        name: Of the indicator.
        values: [... L]; NaN is left out.

    Returns:
        [...], NaN where no layer has the indicator.
    """
    values = np.asarray(values, np.float64)
    is_finite = np.isfinite(values)
    if name.endswith("max_logit"):
        top = np.where(is_finite, values, -np.inf).max(axis=-1)
        return np.where(is_finite.any(axis=-1), top, np.nan)
    count = is_finite.sum(axis=-1)
    total = np.where(is_finite, values, 0.0).sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def scalars_of(indicators: Mapping[str, Any]) -> dict[str, float]:
    """Return the indicators of a step as metrics, one number each."""
    numbers = {name: float(over_layers(name, values)) for name, values in indicators.items()}
    return {f"{PREFIX}{name}": value for name, value in numbers.items() if math.isfinite(value)}


_NUM_RESAMPLES = 50
NAMES: tuple[str, ...] = ("gamma_eff", "gamma_eff_low", "gamma_eff_high")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of a layer's gamma_eff."""

    name: str
    first: int
    """Step of the first estimate."""
    last: int
    """Step of the last estimate."""
    start: tuple[float, float, float]
    """gamma_eff at the first, with the ends of its interval."""
    end: tuple[float, float, float]
    """The same at the last."""


class CongestionRecorder(HistoryRecorder):
    """Keeps gamma_eff of every layer and saves it on request.

    Args:
        path: The file, new or of the run that is resumed.
        resume_step: The restored step; later records are dropped. 0 begins anew.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int = 0):
        super().__init__(path, resume_step)
        self._window: list[tuple[np.ndarray, np.ndarray]] = []

    def record(self, step: int, load: Any, quality: Any) -> dict[str, float]:
        """Add a step, and after every `EVERY` of them an estimate.

        Args:
            step: Optimiser steps done.
            load: Share of the assignments of each expert, [L E].
            quality: Mean log probability of each expert, [L E]; None is no record.

        Returns:
            The mean over layers of gamma_eff and of the ends of its interval; empty between
            estimates.
        """
        if load is None or quality is None or np.shape(load) != np.shape(quality):
            return {}
        pair = (np.asarray(load, np.float64), np.asarray(quality, np.float64))
        if np.isfinite(pair).all() and (pair[0].sum(-1) > 0.0).all():
            self._window.append(pair)
        if step % EVERY or not self._window:
            return {}
        loads, qualities = (np.stack(values) for values in zip(*self._window, strict=True))
        self._window = []
        fits = [
            fit_congestion(loads[:, layer], qualities[:, layer], num_resamples=_NUM_RESAMPLES)
            for layer in range(loads.shape[1])
        ]
        rows = [[fit.gamma, fit.low, fit.high] for fit in fits]
        values = dict(zip(NAMES, np.array(rows).T, strict=True))
        self.add(step, values)
        return {f"router/{name}": float(value.mean()) for name, value in values.items()}


def phases(steps: np.ndarray, gamma: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[Phase]:
    """Return the phases of one layer, without those that do not occur.

    Args:
        steps: Steps [n] of the estimates, rising.
        gamma: Estimates [n].
        low: Lower ends [n] of their intervals.
        high: Upper ends [n].
    """
    if len(steps) < 2:
        return []
    peak = int(np.argmax(gamma))
    last = len(steps) - 1
    level = peak
    while level < last and high[level + 1] >= low[peak]:
        level += 1

    def at(index: int) -> tuple[float, float, float]:
        return float(gamma[index]), float(low[index]), float(high[index])

    bounds = (("surge", 0, peak), ("stabilization", peak, level), ("relaxation", level, last))
    return [
        Phase(name=name, first=int(steps[i]), last=int(steps[j]), start=at(i), end=at(j))
        for name, i, j in bounds
        if j > i
    ]
