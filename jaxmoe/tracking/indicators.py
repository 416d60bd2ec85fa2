# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Indicators of instability over the run: `indicators.npz`.

    <name>[n, l] = the indicator at steps[n] in layer l; NaN where a layer does not have it

written with `--execution.telemetry detailed`. Each is defined in
`jaxmoe/layers/indicators.py` and `jaxmoe/training/measures/indicators.py`. `stability.py` judges
whether a series is bounded; the picture is in `plots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.tracking.history import HistoryRecorder

PREFIX = "indicators/"
"""Prefix of the means over layers among the metrics of a run."""


class IndicatorRecorder(HistoryRecorder):
    """Keeps the indicators of every layer and saves them on request."""

    def record(self, step: int, indicators: Mapping[str, Any]) -> None:
        """Add the indicators of a step.

        Args:
            step: Optimiser steps done.
            indicators: [L] by name, `StepMetrics.indicators`; none is no record.
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
