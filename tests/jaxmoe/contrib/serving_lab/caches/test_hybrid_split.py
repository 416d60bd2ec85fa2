# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Division of experts between host and accelerator, beside all divisions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.serving_lab.caches.hybrid_split import SplitCosts, split_experts

COSTS = SplitCosts(
    parameters=1000,
    flops=1e6,
    bandwidth=1e6,
    host_flops=2e5,
    host_bandwidth=4e5,
    link_bandwidth=2e5,
)
layers = st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=5)
costs = st.builds(
    SplitCosts,
    parameters=st.just(1000),
    flops=st.sampled_from([2e5, 1e6, 1e9]),
    bandwidth=st.sampled_from([1e6, 1e7]),
    host_flops=st.sampled_from([5e4, 1e6]),
    host_bandwidth=st.sampled_from([2e5, 1e6]),
    link_bandwidth=st.sampled_from([1e5, 1e6]),
)


def as_given(layer) -> tuple[dict[Any, int], set[Any]]:
    loads = {number: load for number, (load, _) in enumerate(layer)}
    return loads, {number for number, (_, is_held) in enumerate(layer) if is_held}


def simulated(order, held, loads, given):
    """The accelerator takes what has arrived, in an order; the link sends in the same order."""
    arrived, free = 0.0, 0.0
    for item in order:
        arrived += 0.0 if item in held else given.transfer
        free = max(free, 0.0 if item in held else arrived) + given.accelerator(loads[item])
    return free


def best(loads, held, given):
    found = []
    for flags in itertools.product((False, True), repeat=len(loads)):
        host = [item for item, flag in zip(loads, flags, strict=True) if flag]
        device = [item for item in loads if item not in host]
        seconds = min(simulated(o, held, loads, given) for o in itertools.permutations(device))
        found.append(max(seconds, sum(given.host(loads[item]) for item in host)))
    return min(found)


@settings(max_examples=40, deadline=None)
@given(layer=layers, given=costs)
def test_a_split_is_never_worse_than_one_device_and_close_to_the_best(layer, given):
    loads, held = as_given(layer)
    found = split_experts(loads, held, given)
    assert {*found.host, *found.accelerator} == loads.keys()
    assert len(found.host) + len(found.accelerator) == len(loads)
    assert found.seconds <= min(found.accelerator_alone, found.host_alone) + 1e-12
    times = [given.accelerator(load) for load in loads.values()]
    optimum = best(loads, held, given)
    bound = len(loads) * (max(times) - min(times))
    assert optimum <= found.seconds + 1e-12
    assert found.seconds <= optimum + bound + 1e-12  # equal if all experts take equally long


def test_the_host_takes_the_missing_experts_with_few_tokens():
    found = split_experts({"a": 1, "b": 50, "c": 2, "d": 30}, {"d"}, COSTS)
    assert (found.host, found.accelerator) == (("a", "c"), ("d", "b"))
    assert found.seconds < min(found.accelerator_alone, found.host_alone)


def test_experts_that_are_held_do_not_travel():
    found = split_experts({"a": 1, "b": 1}, {"a", "b"}, COSTS)
    assert found.accelerator_alone == pytest.approx(2 * COSTS.accelerator(1))
    absent = split_experts({"a": 1, "b": 1}, set(), COSTS)
    assert absent.accelerator_alone == pytest.approx(2 * COSTS.transfer + COSTS.accelerator(1))
