# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Moves between real executors, and changes of the mesh between two steps, change no token."""

from __future__ import annotations

import dataclasses
import time
import types
from typing import Any

import jax
import pytest

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DistServeConfig
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.executor import MeshExecutor
from jaxmoe.contrib.fleet.instances import reachable
from jaxmoe.contrib.fleet.layouts import MeshLayouts
from jaxmoe.contrib.fleet.scaling import ElasticExpertsConfig, SLOConfig
from jaxmoe.contrib.fleet.timing import MeasuredSteps
from jaxmoe.execution import ExecutionConfig
from jaxmoe.serve import LatencyObjective, Sampling
from jaxmoe.serve.config import EngineConfig
from jaxmoe.serve.device.executor import ModelExecutor
from jaxmoe.serve.device.pages import page_bytes
from jaxmoe.serve.policies.batching import SplitFuseConfig
from jaxmoe.serve.policies.retention import SwapGroupsConfig
from sharding import MeshConfig, make_mesh
from tests.support.serving import MODEL, SIZES, check_answers, executor, params

GIVEN = {
    id_: (
        tuple(range(1 + id_, 4 + 2 * id_)),
        Sampling(max_tokens=20, temperature=0.0 if id_ % 2 else 1.0, seed=id_),
    )
    for id_ in range(5)
}


def read(stream):
    *tokens, ended = stream
    assert ended.reason == "length", ended
    return [one.token for one in tokens]


def test_handed_over_answers_are_those_of_one_instance_and_bytes_those_of_the_pages():
    first, second = executor(), ModelExecutor(MODEL, params(), config=SIZES)
    first.reset()
    before = first.moved_bytes, first.num_transfers
    given = {id_: (prompt, GIVEN[id_][1]) for id_, (prompt, _) in GIVEN.items()}
    with FleetEngine(
        [first, second],
        EngineConfig(batching=SplitFuseConfig(budget=8)),
        fleet=FleetConfig(dispatch=DistServeConfig()),
    ) as engine:
        streams = {id_: engine.submit(*one) for id_, one in given.items()}
        found = {id_: read(stream) for id_, stream in streams.items()}
        assert engine.drain(timeout=60)
        metrics = engine.metrics
    check_answers(given, found)
    pages = sum(-(-len(prompt) // SIZES.page_size) for prompt, _ in given.values())
    shared = pages - metrics.pages_moved  # in the target's pool from an earlier request
    assert 0 <= shared < pages
    size = page_bytes(MODEL, first.execution, SIZES.page_size)
    assert first.moved_bytes - before[0] == metrics.pages_moved * size
    assert first.num_transfers - before[1] == second.num_transfers == len(given)
    assert second.moved_bytes == metrics.pages_moved * size


def on(size):
    config = MeshConfig(expert=size)
    return make_mesh(config, jax.devices()[:size]), ExecutionConfig(mesh=config)


def leaf_bytes(tree, path):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(leaf.nbytes for name, leaf in leaves if path in jax.tree_util.keystr(name))


def test_impossible_meshes_are_refused_with_the_way_out():
    layouts, served = MeshLayouts([jax.devices()[:4]]), executor()

    def refused(one: Any = served, **sizes):
        with pytest.raises(ValueError) as caught:
            layouts.check(0, one, MeshConfig(**sizes))
        return str(caught.value)

    layouts.check(0, served, MeshConfig(expert=2, tensor=2))
    assert "needs 8 devices, and instance 0 may have 4" in refused(expert=8)
    assert "must have sizes above 0, of the axes tensor and expert" in refused(data=2)
    assert "experts" in refused(expert=3) and "3" in refused(expert=3)
    quantised = types.SimpleNamespace(
        model=MODEL,
        adapters=(),
        execution=dataclasses.replace(
            served.execution,
            precision=dataclasses.replace(served.execution.precision, weights="w8a8"),
        ),
    )
    assert "'w8a8' stay on the mesh on which they were quantised" in refused(quantised, expert=2)
    quantised.execution, quantised.adapters = served.execution, ("sql",)
    assert "the adapters sql are served together" in refused(quantised, expert=2)


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("scaling", [None, "slo", "elastic_experts"])
def test_scaling_of_two_real_instances_changes_no_token_and_loses_none(scaling):
    """Instances of one device, with swaps to host memory; also to 4 devices each by command."""
    first = jax.devices()[:2]
    served = [MeshExecutor(MODEL, jax.device_put(params(), one), config=SIZES) for one in first]
    times = MeasuredSteps.of(served[0], 1)
    tight = LatencyObjective(tpot=1e-9)  # never kept: instances join, devices are doubled
    policies = {"slo": SLOConfig(interval=0.05), None: FleetConfig().scaling}
    policies["elastic_experts"] = ElasticExpertsConfig(interval=0.05, most=2)
    config = EngineConfig(
        batching=SplitFuseConfig(budget=8),
        retention=SwapGroupsConfig(group=2),
    )
    fleet = FleetConfig(scaling=policies[scaling])
    layouts = MeshLayouts(reachable([[one] for one in first]), times)
    found, rounds = {id_: [] for id_ in GIVEN}, 0
    with FleetEngine(served, config, fleet=fleet, hardware=times, layouts=layouts) as engine:
        assert engine._members.fleet.num_open == (1 if scaling == "slo" else 2)
        changes = engine._members.scaling.changes
        done = engine.resharder.begin(MeshConfig(expert=4)) if scaling is None else None
        deadline = time.monotonic() + 300
        is_over = False
        while not is_over:  # one more round after the change
            is_over = done.done() if done else bool(changes)
            streams = {id_: engine.submit(*one, objective=tight) for id_, one in GIVEN.items()}
            for id_, stream in streams.items():
                found[id_].append(read(stream))
            rounds += 1
            assert time.monotonic() < deadline
        if done is not None:
            assert done.result().weight_bytes and engine.resharder.mesh == MeshConfig(expert=4)
        assert engine.drain(timeout=120)
        engine._members.fleet.check_pages()
        metrics = engine.metrics
    assert metrics.num_ended == {"length": rounds * len(GIVEN)}
    if scaling is not None:
        assert changes[0][1:] == (2, 2 if scaling == "elastic_experts" else 1)
    assert all(len(set(map(tuple, answers))) == 1 for answers in found.values())
    check_answers(GIVEN, {id_: answers[0] for id_, answers in found.items()})


@pytest.mark.slow
def test_resharding_under_load_changes_no_token_and_loses_none():
    """Experts over 2 devices, 4, and 2 again, while requests are answered."""
    mesh, execution = on(2)
    served = MeshExecutor(MODEL, params(), config=SIZES, execution=execution, mesh=mesh)
    experts, whole = leaf_bytes(params(), "experts"), leaf_bytes(params(), "")
    changes = []
    with FleetEngine([served], EngineConfig(batching=SplitFuseConfig(budget=8))) as engine:
        streams = {id_: engine.submit(*one) for id_, one in GIVEN.items()}
        for size in (4, 2):
            next(iter(streams[len(changes)]))  # answers have begun, and go on
            served = served.on_mesh(*on(size))
            further = {10 * size + id_: engine.submit(*one) for id_, one in GIVEN.items()}
            streams |= further
            changes.append(engine.exchange(served).result(timeout=120))
        found = {}
        for id_, stream in streams.items():
            found[id_] = [one.token for one in [*stream][:-1]]
        assert engine.drain(timeout=60)
        metrics = engine.metrics
        engine._members.fleet.check_pages()
    given = {id_: GIVEN[id_ % 10 % 5] for id_ in found}
    found = {id_: found[id_] for id_ in found}
    assert metrics.num_ended == {"length": len(GIVEN) * 3}
    # The first token of two streams was taken above.
    whole_answers = {id_: tokens for id_, tokens in found.items() if len(tokens) == 20}
    assert len(whole_answers) == len(found) - 2
    check_answers(given, whole_answers)
    grown, shrunk = changes
    # Two devices receive all dense weights and a quarter of the experts; another, one more quarter.
    assert grown.weight_bytes == 2 * (whole - experts) + 3 * experts // 4
    assert grown.page_bytes == 2 * served.pool_bytes and shrunk.page_bytes == 0
    assert shrunk.weight_bytes == 2 * experts // 4 + experts // 4
