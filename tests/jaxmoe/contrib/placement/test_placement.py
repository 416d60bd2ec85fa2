# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Solvers of placement: brute force on small cases, never worse than identity or greedy, and a
planted structure is found."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.place import compare, speculative_devices
from jaxmoe.contrib.placement import (
    PLACERS,
    ExFlowConfig,
    ExpertGroupingConfig,
    MoETunerConfig,
    integer_program,
)
from jaxmoe.contrib.placement import exflow as exflow_solver
from jaxmoe.contrib.placement.grouping import cluster_ids, grouping_cost
from jaxmoe.contrib.placement.integer_program import follow_layers
from jaxmoe.contrib.placement.measures import (
    crossings,
    flows,
    imbalance,
    local_share,
    pair_traffic,
)
from jaxmoe.contrib.placement.moetuner import cluster_by_load, label_devices
from jaxmoe.routing.telemetry.trace import RoutingTrace
from sharding.expert_parallel.placement import ExpertPlacement
from tests.support.traces import planted

QUICK = {"time_limit_s": 0.0}


def random_trace(seed, *, num_layers=2, num_experts=4, num_tokens=40, top_k=1):
    """Tokens that follow a random, uneven law; some slots empty."""
    rng = np.random.default_rng(seed)
    shape = (num_layers, num_tokens, num_experts)
    scores = rng.random(shape) + rng.random((num_layers, 1, num_experts))
    ids = np.argsort(-scores, axis=-1)[..., :top_k]
    ids = np.where(rng.random(ids.shape) < 0.1, num_experts, ids)
    return RoutingTrace(rng.integers(7, size=num_tokens), ids, num_experts)


@functools.cache
def every_layer(num_experts, num_devices):
    """All ways to give E/P experts to each device."""
    return [
        np.array(devices)
        for devices in itertools.product(range(num_devices), repeat=num_experts)
        if (np.bincount(devices, minlength=num_devices) * num_devices == num_experts).all()
    ]


def every_placement(num_layers, num_experts, num_devices):
    for layers in itertools.product(every_layer(num_experts, num_devices), repeat=num_layers):
        yield np.stack(layers)


def test_measures_by_a_loop_over_tokens():
    trace = random_trace(0, num_layers=3, num_experts=6, top_k=2)
    placement = ExpertPlacement(
        np.random.default_rng(1).permuted([[0, 0, 1, 1, 2, 2]] * 3, axis=1), 3
    )
    number, traffic, held = 0, np.zeros((3, 3)), np.zeros((3, 3))
    home = placement.device_of
    for layer, tokens in enumerate(trace.expert_ids):
        for token, slots in enumerate(tokens):
            for a in slots[slots < 6]:
                held[layer, home[layer, a]] += 1
                after = trace.expert_ids[layer + 1, token] if layer < 2 else []
                for b in (b for b in after if b < 6):
                    c, d = sorted((home[layer, a], home[layer + 1, b]))
                    traffic[c, d] += c != d
                    number += c != d
    affinity = trace.affinity()
    assert crossings(affinity, home) == number > 0
    np.testing.assert_array_equal(pair_traffic(flows(affinity, home, 3)), traffic)
    expected = np.abs(held - held.mean(1, keepdims=True)).sum()
    assert imbalance(trace.loads(), home, 3) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_exflow_equals_brute_force(seed):
    trace = random_trace(seed)
    affinity = trace.affinity()
    least = min(crossings(affinity, devices) for devices in every_placement(2, 4, 2))
    solution = ExFlowConfig().solve(trace, 2)
    assert crossings(affinity, solution.placement.device_of) == solution.cost == least
    assert solution.gap == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_highs_alone_equals_brute_force(seed):
    """The program itself, without the candidates beside it."""
    affinity = random_trace(seed, top_k=2, num_layers=3).affinity()
    found, bound = exflow_solver._program(affinity, 3, 2, 30.0)
    least = min(crossings(affinity, devices) for devices in every_placement(3, 4, 2))
    assert crossings(affinity, found) == bound == least


@pytest.mark.parametrize("seed", range(3))
def test_moetuner_equals_brute_force(seed):
    """Clusters by load; then, of these clusters, their devices."""
    trace = random_trace(seed)
    loads = trace.loads()
    clusters = np.stack([cluster_by_load(layer, 2, time_limit_s=5.0) for layer in loads])
    least = min(imbalance(loads, devices, 2) for devices in every_placement(2, 4, 2))
    assert imbalance(loads, clusters, 2) == pytest.approx(least)
    solution = MoETunerConfig().solve(trace, 2)
    assert imbalance(loads, solution.placement.device_of, 2) == pytest.approx(least)


def test_devices_of_clusters_equal_brute_force():
    flow = np.random.default_rng(0).integers(20, size=(1, 3, 3))
    labels, gap = label_devices(flow, 2, time_limit_s=20.0)

    def worst(one):
        return pair_traffic(flows(flow, np.stack(one), 3)).max()

    orders = [np.array(order) for order in itertools.permutations(range(3))]
    least = min(worst(one) for one in itertools.product(orders, repeat=2))
    assert worst(labels) == pytest.approx(least)
    assert gap == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 2, 1), (6, 3, 2), (8, 4, 2)]))
def test_never_worse_than_identity_or_greedy(seed, sizes):
    experts, devices, top_k = sizes
    trace = random_trace(seed, num_layers=3, num_experts=experts, top_k=top_k)
    affinity, loads = trace.affinity(), trace.loads()
    identity = ExpertPlacement.identity(3, experts, devices).device_of
    greedy = follow_layers(affinity, identity[0], devices)
    exflow = ExFlowConfig(**QUICK).solve(trace, devices).placement.device_of
    assert crossings(affinity, exflow) <= min(
        crossings(affinity, identity), crossings(affinity, greedy)
    )

    def both(devices_of):
        traffic = pair_traffic(flows(affinity, devices_of, devices)).max()
        return imbalance(loads, devices_of, devices), traffic

    tuned = MoETunerConfig(**QUICK).solve(trace, devices).placement.device_of
    assert both(tuned) <= both(identity)
    grouped = ExpertGroupingConfig().solve(trace, devices)
    frequency, total = np.bincount(trace.token_ids, minlength=trace.vocab_size), 0.0
    for layer in range(3):
        counts = trace.by_token(layer, trace.vocab_size)
        given = (counts, frequency)
        ids = cluster_ids(*given, identity[layer], devices, 0.5)
        total += grouping_cost(*given, ids, identity[layer], devices, 0.5)
    assert grouped.cost <= total + 1e-6


def test_a_case_too_large_for_highs_skips_it(monkeypatch):
    trace = random_trace(0)
    monkeypatch.setattr(integer_program, "MOST_ENTRIES", 10)
    solution = ExFlowConfig().solve(trace, 2)
    assert solution.found_by != "highs" and solution.gap is None


def test_assignment_equals_every_assignment():
    benefit = np.random.default_rng(0).normal(size=(6, 3))
    best = max(benefit[np.arange(6), devices].sum() for devices in every_layer(6, 3))
    chosen = integer_program.assign_evenly(benefit)
    assert benefit[np.arange(6), chosen].sum() == pytest.approx(best)
    assert np.bincount(chosen).tolist() == [2, 2, 2]


def test_ids_alone_equal_brute_force_when_only_locality_counts():
    rng = np.random.default_rng(0)
    counts, experts = rng.integers(9, size=(5, 4)), np.array([0, 1, 1, 0])
    frequency = counts.sum(1)
    ids = cluster_ids(counts, frequency, experts, 2, 0.0)
    every = itertools.product(range(2), repeat=5)
    least = min(grouping_cost(counts, frequency, np.array(one), experts, 2, 0.0) for one in every)
    assert grouping_cost(counts, frequency, ids, experts, 2, 0.0) == least


@pytest.mark.parametrize("seed", range(2))
def test_a_planted_structure_is_found_and_holds_for_other_tokens(seed):
    """Crossings cut by 30% and more, local activation at least twice that of chance."""
    trace, devices = planted(seed), 4
    seen, unseen = trace.part(0, 1024), trace.part(1024, 2048)
    identity = ExpertPlacement.identity(trace.num_layers, trace.num_experts, devices)
    before = crossings(unseen.affinity(), identity.device_of)
    placed = ExFlowConfig(**QUICK).solve(seen, devices).placement
    assert crossings(unseen.affinity(), placed.device_of) <= 0.7 * before
    grouped = ExpertGroupingConfig().solve(seen, devices).placement
    where = speculative_devices(seen, unseen, grouped)
    assert all(np.bincount(layer).tolist() == [256] * devices for layer in where)
    assert local_share(unseen, grouped, where) >= 2 / devices
    anywhere = np.random.default_rng(0).permuted(where, axis=1)
    assert local_share(unseen, grouped, anywhere) == pytest.approx(1 / devices, abs=0.03)


def test_the_table_has_a_row_for_every_placement(monkeypatch):
    monkeypatch.setattr(integer_program, "MOST_ENTRIES", 0)
    rows = compare(planted(0, num_tokens=512), 4)
    assert [row[0] for row in rows[1:]] == ["identity", "random", *PLACERS]
    assert {len(row) for row in rows} == {len(rows[0])}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExFlowConfig(time_limit_s=-1.0), "placer.time_limit_s=-1.0 must be finite"),
        (lambda: ExpertGroupingConfig(balance=1.5), "placer.balance=1.5 must lie between 0 and 1"),
        (lambda: compare(random_trace(0), 3), "3 devices cannot hold equal parts of 4 experts"),
        (lambda: compare(random_trace(0, num_tokens=4), 4), "has 4 tokens, too few"),
        *(
            (lambda placer=placer: placer().solve(random_trace(0), 3), "cannot hold equal parts")
            for placer in PLACERS.values()
        ),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
