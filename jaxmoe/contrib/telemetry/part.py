# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""`Telemetry`: records and verdicts of a run with detailed telemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxmoe.contrib.telemetry.recorders import (
    CONGESTION,
    INDICATORS,
    CongestionRecorder,
    IndicatorRecorder,
    over_layers,
    scalars_of,
)
from jaxmoe.contrib.telemetry.stability import judge_run
from jaxmoe.run.assemble import Assembly
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.parts import RunPart
from jaxmoe.run.restore import StartingPoint
from jaxmoe.run.supervision import Supervision, Watches
from jaxmoe.tracking.history import read_history
from jaxmoe.training.metrics import StepMetrics
from jaxmoe.training.state import TrainState

_VERDICTS = {True: "bounded", False: "NOT bounded", None: "not judged"}
"""Text for the verdict of an indicator."""


class Telemetry(RunPart):
    """Records indicators and the congestion of routers, and judges whether they stay bounded.

    Args:
        config: Unused.
        directory: Run directory.
        supervision: Unused.
    """

    def __init__(self, config: PretrainConfig, directory: RunDirectory, supervision: Supervision):
        del config, supervision
        self._directory = directory
        self._indicators: IndicatorRecorder | None = None
        self._congestion: CongestionRecorder | None = None

    def begin(self, assembly: Assembly, step: int, state: TrainState, watches: Watches) -> None:
        """Open the records of the steps up to this one, unless they are open."""
        del assembly, state
        watches.reporter.add_recorder(self)
        if jax.process_index() == 0 and self._indicators is None:
            path = self._directory.path
            self._indicators = IndicatorRecorder(path / INDICATORS, step)
            self._congestion = CongestionRecorder(path / CONGESTION, step)

    def step_numbers(self, step: int, metrics: StepMetrics) -> Mapping[str, float]:
        """Record a step; return its indicators over layers and, every few steps, gamma_eff."""
        assert self._indicators is not None and self._congestion is not None  # by `begin`
        indicators, quality = (metrics.measures.get(name) for name in ("indicators", "quality"))
        self._indicators.record(step, indicators or {})
        numbers = scalars_of(indicators or {})
        return numbers | self._congestion.record(step, metrics.load, quality)

    def flush(self) -> None:
        """Write the records of the steps so far."""
        for recorder in (self._indicators, self._congestion):
            if recorder is not None:
                recorder.save()

    def restore(self, start: StartingPoint) -> None:
        """Write the records and open them anew with the next loop, without those of later steps."""
        del start
        self.flush()
        self._indicators = self._congestion = None

    def rows(self) -> Mapping[str, Any]:
        """Return `stability`: for each indicator whether it stayed bounded, as text."""
        if jax.process_index() != 0:
            return {}
        self.flush()
        stability = judge_indicators(self._directory)
        return {"stability": stability} if stability else {}


def judge_indicators(directory: RunDirectory) -> dict[str, str]:
    """Return for each indicator whether it stayed bounded, with its numbers as text.

    Args:
        directory: Run directory.
    """
    if not (directory.path / INDICATORS).exists():
        return {}
    _, series = read_history(directory.path / INDICATORS)
    means = {name: over_layers(name, values) for name, values in series.items()}
    return {
        name: f"{_VERDICTS[verdict.holds]}: {verdict.explanation}"
        for name, verdict in judge_run(means).items()
    }
