# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the numbers of an engine in the text format of Prometheus.

Names begin with `jaxmoe_`. Times of answers are histograms, so that several servers add up:
`histogram_quantile(0.99, sum by (le) (rate(jaxmoe_ttft_seconds_bucket[5m])))`. With several
instances the numbers of each have a label `instance`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from jaxmoe.optional import require
from jaxmoe.serve.http.served import Served
from jaxmoe.serve.metrics import BOUNDS

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
    "requests_moved": ("num_moved", "Requests that went to another instance."),
    "pages_moved": ("pages_moved", "Pages that were copied to another instance."),
    "steps": ("num_steps", "Steps that devices computed."),
    "tokens_computed": ("tokens_computed", "Tokens that devices computed."),
    "tokens_cached": ("tokens_cached", "Tokens of prompts that were found in the pool."),
    "tokens_generated": ("tokens_generated", "Tokens of answers."),
    "drafts_checked": ("drafts_checked", "Drafted tokens that devices computed."),
    "drafts_accepted": ("drafts_accepted", "Drafted tokens that the model drew as well."),
}
_TIMES = {
    "ttft": "Seconds to the first token.",
    "tpot": "Mean seconds of each further token.",
    "total": "Seconds to the last token.",
}


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
        engine = served.engine
        name = served.name
        self._load = engine.expert_load
        self._model = name
        self._core = core
        self._labels = ["model"]
        self._instances = [([name], engine.metrics)]
        if len(engine.instance_metrics) > 1:
            self._labels = ["model", "instance"]
            self._instances = [
                ([name, str(number)], metrics_of_instance)
                for number, metrics_of_instance in enumerate(engine.instance_metrics)
            ]

    def collect(self) -> Iterator[Any]:
        """Yield the families."""
        gauge = self._core.GaugeMetricFamily
        counter = self._core.CounterMetricFamily
        for family, names in ((gauge, _GAUGES), (counter, _COUNTERS)):
            for name, (field, help_text) in names.items():
                histogram = family(f"jaxmoe_{name}", help_text, labels=self._labels)
                for labels, metrics in self._instances:
                    histogram.add_metric(labels, getattr(metrics, field))
                yield histogram
        endings = self._core.CounterMetricFamily(
            "jaxmoe_requests_ended", "Ended requests by reason.", labels=[*self._labels, "reason"]
        )
        for labels, metrics in self._instances:
            for reason, number in metrics.num_ended.items():
                endings.add_metric([*labels, reason], number)
        yield endings
        ratio = self._core.GaugeMetricFamily(
            "jaxmoe_expert_load_ratio",
            "Tokens of the busiest expert over the mean, by MoE layer.",
            labels=["layer", "model"],
        )
        for layer, load in enumerate(() if self._load is None else self._load):
            if load.sum():
                ratio.add_metric([str(layer), self._model], float(load.max() / load.mean()))
        yield ratio
        for name, help_text in _TIMES.items():
            histogram = self._core.HistogramMetricFamily(
                f"jaxmoe_{name}_seconds", help_text, labels=self._labels
            )
            for labels, metrics in self._instances:
                times = getattr(metrics, f"times_{name}")
                bounds = (*map(str, BOUNDS), "+Inf")
                reached = itertools.accumulate(times.counts)
                buckets = list(zip(bounds, reached, strict=True))
                histogram.add_metric(labels, buckets, times.seconds)
            yield histogram
