# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Records the load of every expert over a run in `router.npz`.

    load[n, l, e] = assignments of expert e / assignments of all experts,  in layer l at steps[n]

so that every `load[n, l]` sums to 1 and 1/E is fair. Counts are taken before drops. `load_metrics`
has the numbers per layer and expert for trackers. The pictures are in `plots.py` and `load_map.py`,
means over layers in `jaxmoe/routing/telemetry/summary.py`.
"""

from __future__ import annotations

import os

import numpy as np

from jaxmoe.tracking.history import HistoryRecorder, read_history
from jaxmoe.tracking.tracker import Histogram

MAX_EXPERT_SCALARS = 256
"""Largest L * E with one scalar per expert; larger models have one histogram per layer."""
_BINS = 32


class RouterLoadRecorder(HistoryRecorder):
    """Keeps the load of the experts and saves it on request."""

    def record(self, step: int, counts: np.ndarray) -> None:
        """Add the load at a step.

        Args:
            step: Optimiser steps done.
            counts: [L E] assignments of each expert, or any multiple of them.
        """
        counts = np.asarray(counts, np.float64)
        total = counts.sum(axis=-1, keepdims=True)
        load = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        self.add(step, {"load": load})


def read_router_load(path: str | os.PathLike[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the content of `router.npz`.

    Args:
        path: The file.

    Returns:
        steps [n] and load [n L E]. Both are empty, with a warning, for a file that is damaged.
    """
    steps, series = read_history(path)
    load = series.get("load", np.zeros((0, 0, 0), np.float32))
    return steps[: len(load)], load


def load_metrics(load: np.ndarray) -> tuple[dict[str, float], dict[str, Histogram]]:
    """Return the load of every layer and expert under the names that trackers show.

    Loads are multiples of the fair share: 1 is fair, 0 is an expert without a token. Layers are
    those with a router, numbered from 0 as in the report.

        router/layer_03/max_violation, min_violation, load_entropy    always
        router/layer_03/load_expert_07      up to `MAX_EXPERT_SCALARS` experts of all layers
        router/layer_03/load                beyond: a histogram over the experts

    Args:
        load: [L E] shares of the assignments.

    Returns:
        Scalars by name, and histograms by name.
    """
    layers, experts = load.shape
    share = np.asarray(load, np.float64)
    ratio = share * experts
    entropy = -np.sum(share * np.log(np.where(share > 0.0, share, 1.0)), -1)
    entropy /= np.log(max(experts, 2))
    scalars: dict[str, float] = {}
    histograms: dict[str, Histogram] = {}
    width = max(2, len(str(experts - 1)))
    for layer, row in enumerate(ratio):
        name = f"router/layer_{layer:0{max(2, len(str(layers - 1)))}}"
        scalars[f"{name}/max_violation"] = float(row.max()) - 1.0
        scalars[f"{name}/min_violation"] = 1.0 - float(row.min())
        scalars[f"{name}/load_entropy"] = float(entropy[layer])
        if layers * experts <= MAX_EXPERT_SCALARS:
            for expert, value in enumerate(row):
                scalars[f"{name}/load_expert_{expert:0{width}}"] = float(value)
        else:
            top = max(2.0, float(row.max()))
            histograms[f"{name}/load"] = np.histogram(row, bins=_BINS, range=(0.0, top))
    return scalars, histograms
