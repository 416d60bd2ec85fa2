# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the numbers of an engine in the text format of Prometheus.

Names begin with `jaxmoe_`. Times are quantiles of the last thousand answers, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmoe.optional import require
from jaxmoe.serve.http.served import Served

_GAUGES = {
    "requests_waiting": ("num_waiting", "Requests in the queue."),
    "requests_running": ("num_running", "Requests with pages."),
    "pages": ("pages_total", "Pages of the pool."),
    "pages_used": ("pages_used", "Pages that requests hold."),
    "pages_cached": ("pages_cached", "Pages without a request that may be used again."),
    "tokens_per_second": ("tokens_per_second", "Tokens of answers per second, over 10 seconds."),
}
_COUNTERS = {
    "requests": ("num_submitted", "Requests so far."),
    "preemptions": ("num_preempted", "Times that a request gave its pages back for another."),
    "steps": ("num_steps", "Steps that devices computed."),
    "tokens_computed": ("tokens_computed", "Tokens that devices computed."),
    "tokens_cached": ("tokens_cached", "Tokens of prompts that were found in the pool."),
    "tokens_generated": ("tokens_generated", "Tokens of answers."),
}
_TIMES = {"ttft": "Seconds to the first token.", "tpot": "Seconds of each further token."}
_QUANTILES = (0.5, 0.9, 0.99)


def prometheus_text(served: Served) -> tuple[bytes, str]:
    """Return the numbers of a model's engine and the type of the text.

    Args:
        served: The model.

    Raises:
        MissingPackageError: prometheus-client is not installed.
    """
    client = require("prometheus_client", "serve")
    core = require("prometheus_client.core", "serve")
    registry = client.CollectorRegistry()
    registry.register(_Collector(served, core))
    return client.generate_latest(registry), client.CONTENT_TYPE_LATEST


class _Collector:
    """Numbers of one time."""

    def __init__(self, served: Served, core: Any):
        self._metrics, self._load = served.engine.metrics, served.engine.expert_load
        self._model, self._core = served.name, core

    def collect(self) -> Iterator[Any]:
        """Yield the families."""
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        for family, names in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, (field, words) in names.items():
                found = family(f"jaxmoe_{name}", words, labels=["model"])
                found.add_metric([self._model], getattr(self._metrics, field))
                yield found
        ended = self._core.CounterMetricFamily(
            "jaxmoe_requests_ended", "Ended requests by reason.", labels=["model", "reason"]
        )
        for reason, number in self._metrics.num_ended.items():
            ended.add_metric([self._model, reason], number)
        yield ended
        ratio = self._core.GaugeMetricFamily(
            "jaxmoe_expert_load_ratio",
            "Tokens of the busiest expert over the mean, by MoE layer.",
            labels=["layer", "model"],
        )
        for layer, load in enumerate(() if self._load is None else self._load):
            if load.sum():
                ratio.add_metric([str(layer), self._model], float(load.max() / load.mean()))
        yield ratio
        for name, words in _TIMES.items():
            times = getattr(self._metrics, name)
            found = self._core.GaugeMetricFamily(
                f"jaxmoe_{name}_seconds", words, labels=["model", "quantile"]
            )
            for quantile in _QUANTILES if times else ():
                value = float(np.quantile(times, quantile))
                found.add_metric([self._model, str(quantile)], value)
            yield found
