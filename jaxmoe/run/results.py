# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records that the methods of `Run` return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxmoe.training.loop import Status
from jaxmoe.training.metrics import StepMetrics, fetch_metrics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainedStep:
    """One optimiser step of `Run.steps`."""

    step: int
    """Number of the step, from 1."""
    metrics: StepMetrics
    """Metrics on the devices; reading a value waits until the step is computed."""

    @property
    def loss(self) -> float:
        """Cross-entropy in nats per token."""
        return float(fetch_metrics([self.metrics])[0].loss)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How a call of `Run.train` ended."""

    status: Status
    """done; preempted or interrupted (saved, can be resumed); or why it ended early."""
    step: int
    """Number of steps trained, over all starts."""
    checkpoint_step: int | None
    """Step of the newest checkpoint; None without one."""
    message: str = ""
    """Cause of an end that is an error, in one sentence; empty otherwise."""
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    """Content of summary.json; empty on all processes but the first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateResult:
    """Held-out loss of one checkpoint."""

    step: int
    """Step of the checkpoint."""
    num_tokens: int
    """Number of predicted tokens."""
    bits_per_token: float
    """Mean held-out loss in bits per token, as `eval/bits_per_token` in metrics.jsonl."""
    bits_per_byte: float | None
    """The same per byte of text; None for data without bytes."""
    precision: str = ""
    """Formats of quantised weights and cache; empty without any."""
