# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds at once, on few pages, are answered as each alone."""

import pytest

from jaxmoe.serve.engine import Engine, EngineConfig
from tests.support.mixed_requests import check_told, mixed_requests, told
from tests.support.serving import Smaller


@pytest.mark.parametrize("count", [24, pytest.param(250, marks=pytest.mark.slow)])
def test_mixed_requests_equal_each_alone(count):
    """Grammars, penalties, biases, filters, stop ids, scores, embeddings, experts; preempted."""
    requests = mixed_requests(count)
    with Engine(Smaller()) as engine:
        alone = [
            told(engine.submit(*request, salt=str(number)))
            for number, request in enumerate(requests)
        ]
    config = EngineConfig(max_waiting=count)
    with Engine(Smaller(num_pages=9), config) as engine:
        with engine.held():
            streams = [engine.submit(*request) for request in requests]
        answers = [told(stream) for stream in streams]
        assert engine.drain(60)
    check_told(answers, alone)
    metrics = engine.metrics
    assert metrics.num_preempted and metrics.tokens_cached
    assert {reason for _, reason, _ in alone} == {"length", "stop"}
