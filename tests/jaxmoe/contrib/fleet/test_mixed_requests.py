# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests of all kinds to instances that migrate, preempt and change their mesh."""

import dataclasses

import jax
import pytest

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DISPATCH
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.executor import MeshExecutor
from jaxmoe.contrib.fleet.instances import reachable
from jaxmoe.contrib.fleet.layouts import MeshLayouts
from jaxmoe.contrib.fleet.timing import MeasuredSteps
from jaxmoe.serve.config import EngineConfig
from jaxmoe.serve.engine import Engine
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.policies.retention import SwapGroupsConfig
from sharding import MeshConfig
from tests.support.mixed_requests import check_told, mixed_requests, told
from tests.support.serving import MODEL, SIZES, Smaller, params


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["llumnix", "dist_serve"])
def test_mixed_requests_equal_each_alone_under_moves_swaps_and_another_mesh(dispatch):
    requests = mixed_requests(250)
    with Engine(Smaller()) as engine:
        alone = [
            told(engine.submit(*request, salt=str(number)))
            for number, request in enumerate(requests)
        ]
    sizes = dataclasses.replace(SIZES, num_pages=10)
    devices = jax.devices()[:2]
    executors = [
        MeshExecutor(MODEL, jax.device_put(params(), one), config=sizes) for one in devices
    ]
    times = MeasuredSteps.of(executors[0], 1)
    layouts = MeshLayouts(reachable([[one] for one in devices]), times)
    config = EngineConfig(
        batching=SplitFuseConfig(budget=8),
        retention=SwapGroupsConfig(group=2),
        max_waiting=len(requests),
    )
    fleet = FleetConfig(dispatch=DISPATCH[dispatch]())
    with FleetEngine(executors, config, fleet=fleet, hardware=times, layouts=layouts) as engine:
        with engine.held():
            streams = [engine.submit(*request) for request in requests]
        change = engine.resharder.begin(MeshConfig(expert=4))
        answers = [told(stream) for stream in streams[:125]]
        assert change.result(timeout=600).weight_bytes
        further = [engine.submit(*request) for request in requests[:50]]  # on the other mesh
        answers += [told(stream) for stream in (*streams[125:], *further)]
        assert engine.drain(60)
        engine._members.fleet.check_pages()
        metrics = engine.metrics
    check_told(answers, [*alone, *alone[:50]])
    assert metrics.num_preempted and metrics.pages_moved and metrics.tokens_cached
