# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Reads what the files of a run record, whether it has ended or not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmoe.configs import from_json
from jaxmoe.run.config import PretrainConfig
from jaxmoe.run.directory import RunDirectory
from jaxmoe.run.plan import make_plan
from jaxmoe.tracking.jsonl import CURVE_LINES, Series, read_last_metrics, read_metrics
from jaxmoe.tracking.tracker import (
    BITS_PER_BYTE,
    BITS_PER_TOKEN,
    DROPPED_FRACTION,
    LOSS,
    MAX_VIOLATION,
    TRAINED_SECONDS,
    TRAINED_TOKENS,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Content of the files of one run."""

    directory: RunDirectory
    config: Mapping[str, Any]
    """Content of config.json."""
    summary: Mapping[str, Any]
    """Content of summary.json; the latest metrics while the run has not ended."""
    series: Series
    """Logged metrics; of a long run every loss, and of the others some thousand steps."""
    notes: tuple[str, ...]
    """Remarks for the reader: the run has not ended, or lacks some records."""

    @property
    def flops_per_token(self) -> float | None:
        """Model FLOPs of a training step per token; None if this version cannot read the config."""
        if self.summary.get("model_flops_per_token") is not None:
            return float(self.summary["model_flops_per_token"])
        try:
            config = from_json(PretrainConfig, self.config)
        except ValueError:
            return None
        return make_plan(config).flops_per_token

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of a token: from the summary, or from a held-out loss in both units."""
        if self.summary.get("bytes_per_token") is not None:
            return float(self.summary["bytes_per_token"])
        if BITS_PER_BYTE not in self.series or BITS_PER_TOKEN not in self.series:
            return None
        ratio = self.series[BITS_PER_TOKEN][1][-1] / self.series[BITS_PER_BYTE][1][-1]
        return float(ratio) if np.isfinite(ratio) else None


def read_run(path: str | os.PathLike[str]) -> RecordedRun:
    """Read the files of a run.

    Args:
        path: Run directory.

    Raises:
        ValueError: There is no run, none of its steps is recorded, or a file is damaged.
    """
    directory = RunDirectory(path)
    if not directory.path.is_dir():
        raise ValueError(
            f"{path} is not a directory: give that of a run, such as runs/pretrain/tiny"
        )
    config = directory.config_json()
    try:
        series = read_metrics(directory.metrics_file, max_lines=CURVE_LINES)
    except FileNotFoundError:
        series = {}
    if LOSS not in series:
        raise ValueError(f"{path} has no steps yet ({directory.metrics_file.name}): wait for some")
    summary = directory.summary()
    notes = []
    steps = int(series[LOSS][0][-1])
    if summary is None or summary.get("steps", 0) < steps:
        planned = config.get("training", {}).get("steps", "?")
        notes.append(f"{path} has not ended: step {steps} of {planned}, numbers so far")
        summary = {**(summary or {}), **_so_far(directory, steps)}
    elif summary.get("status") != "done":
        notes.append(f"{path} ended early: {summary.get('status')} at step {summary.get('steps')}")
    for name, what in ((TRAINED_TOKENS, "tokens"), (TRAINED_SECONDS, "times")):
        if name not in series:
            notes.append(f"{path} was written by a version that did not record {what}")
    return RecordedRun(
        directory=directory, config=config, summary=summary, series=series, notes=tuple(notes)
    )


def _so_far(directory: RunDirectory, steps: int) -> dict[str, Any]:
    """Return the summary of a run that has not ended."""
    last = read_last_metrics(directory.metrics_file)
    return {
        "status": "unfinished",
        "steps": steps,
        "tokens": last.get(TRAINED_TOKENS),
        "trained_seconds": last.get(TRAINED_SECONDS),
        "final_loss": last.get(LOSS),
        "eval_bits_per_byte": last.get(BITS_PER_BYTE),
        "eval_bits_per_token": last.get(BITS_PER_TOKEN),
        "router_max_violation": last.get(MAX_VIOLATION),
        "router_dropped_fraction": last.get(DROPPED_FRACTION),
    }
