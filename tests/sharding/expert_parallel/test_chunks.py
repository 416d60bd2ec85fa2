# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Time of a chunked MoE layer compared with a simulation of its graph, and the chosen chunks."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from sharding.expert_parallel.chunks import (
    ChunkCost,
    LayerCosts,
    bottleneck,
    choose_num_chunks,
    fit_cost,
    layer_seconds,
)

STAGES = ("all_gather", "all_to_all", "experts", "all_to_all", "reduce_scatter")
QUEUES = ("expert_tensor", "expert", "compute", "expert", "expert_tensor")


def simulate(costs, num_chunks, gradients=0.0):
    """Return seconds: an operation starts when its input is ready and its queue is free."""
    durations = [getattr(costs, stage).seconds(1 / num_chunks) for stage in STAGES]
    ready, free = np.zeros(num_chunks), dict.fromkeys(QUEUES, 0.0)
    for duration, queue in zip(durations, QUEUES, strict=True):  # all there, then all back
        for chunk in range(num_chunks):
            ready[chunk] = free[queue] = max(ready[chunk], free[queue]) + duration
    idle = ready[-1] - 2 * num_chunks * durations[1]  # of the links of `expert`
    return ready[-1] + max(0.0, gradients - idle)


COSTS = st.builds(
    ChunkCost, alpha=st.sampled_from([0.0, 0.01, 0.1, 0.5]), beta=st.floats(0, 10, width=16)
)
LAYERS = st.builds(
    LayerCosts, all_to_all=COSTS, experts=COSTS, all_gather=COSTS, reduce_scatter=COSTS
)
GRADIENTS = st.sampled_from([0.0, 0.3, 5.0])


@given(LAYERS, st.integers(1, 12), GRADIENTS)
def test_layer_seconds_equal_the_simulation(costs, num_chunks, gradients):
    wanted = simulate(costs, num_chunks, gradients)
    assert layer_seconds(costs, num_chunks, gradients) == pytest.approx(wanted)


def one(seconds):
    return ChunkCost(alpha=seconds, beta=0.0)


@pytest.mark.parametrize(
    ("case", "g", "a", "x", "s", "gradients"),
    [
        ("gradients", 1, 2, 1, 1, 30),
        ("experts", 1, 2, 9, 1, 0),
        ("all_to_all", 1, 5, 2, 1, 0),
        ("expert_tensor", 5, 2, 3, 4, 0),
    ],
)
@pytest.mark.parametrize("r", [2, 3, 8])
def test_four_bottlenecks_have_closed_forms(case, g, a, x, s, gradients, r):
    """Each bottleneck has its closed form, and the simulation agrees."""
    costs = LayerCosts(all_gather=one(g), all_to_all=one(a), experts=one(x), reduce_scatter=one(s))
    wanted = {
        "gradients": 2 * r * a + gradients,
        "experts": 2 * a + g + s + r * x,
        "all_to_all": 2 * r * a + g + s,
        "expert_tensor": 2 * a + r * (g + s),
    }
    assert bottleneck(costs, r, gradients) == case
    assert simulate(costs, r, gradients) == wanted[case]
    assert layer_seconds(costs, r, gradients) == wanted[case]


def test_without_gradients_the_bottleneck_is_the_all_to_all():
    assert bottleneck(LayerCosts(all_to_all=one(2.0), experts=one(1.0)), 4) == "all_to_all"


@given(LAYERS, GRADIENTS)
def test_chosen_number_of_chunks_is_fastest(costs, gradients):
    """Simulated, forward and backward, for every integer up to 60."""
    backward = LayerCosts(
        all_gather=costs.reduce_scatter,
        reduce_scatter=costs.all_gather,
        all_to_all=costs.all_to_all,
        experts=ChunkCost(alpha=2 * costs.experts.alpha, beta=2 * costs.experts.beta),
    )
    seconds = {r: simulate(costs, r) + simulate(backward, r, gradients) for r in range(1, 61)}
    tokens = math.lcm(*range(1, 61))
    chosen = choose_num_chunks(costs, tokens, gradients=gradients, most=60)
    assert seconds[chosen] <= min(seconds.values()) * (1 + 1e-12)
    allowed = choose_num_chunks(costs, 48, gradients=gradients, most=60)
    assert 48 % allowed == 0
    assert seconds[allowed] <= min(seconds[r] for r in seconds if 48 % r == 0) * (1 + 1e-12)
    # One minimum: after the best, seconds do not fall again.
    rising = [seconds[r] for r in range(chosen, 61)]
    assert all(b >= a * (1 - 1e-9) for a, b in zip(rising, rising[1:], strict=False))


def test_one_chunk_without_overlap_and_several_with():
    """Nothing to overlap: one chunk. Two operations of equal time: several."""
    slow = LayerCosts(
        all_to_all=ChunkCost(alpha=1.0, beta=0.1), experts=ChunkCost(alpha=1.0, beta=0.1)
    )
    assert choose_num_chunks(slow, 4096) == 1
    even = LayerCosts(
        all_to_all=ChunkCost(alpha=0.01, beta=2.0), experts=ChunkCost(alpha=0.01, beta=2.0)
    )
    assert choose_num_chunks(even, 4096) > 1
    assert choose_num_chunks(even, 4096, most=2) == 2
    assert choose_num_chunks(even, 4099) == 1  # a prime number of tokens
    free = dataclasses.replace(even, all_to_all=ChunkCost(alpha=0.0, beta=2.0), experts=one(0.0))
    assert choose_num_chunks(free, 4096) == 1  # of equals the least


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.floats(1e-6, 1.0)),
        min_size=2,
        max_size=8,
        unique_by=lambda pair: pair[0],
    )
)
def test_fit_cost_equals_scipy(measured):
    amounts, seconds = np.array(measured).T
    cost = fit_cost(amounts.tolist(), seconds.tolist())
    columns = np.stack([1 / seconds, amounts / seconds], 1)
    missed = np.linalg.norm(columns @ [cost.alpha, cost.beta] - 1)
    assert missed == pytest.approx(nnls(columns, np.ones_like(seconds))[1], abs=1e-6)


def test_fit_cost_recovers_the_line():
    cost = fit_cost([1e3, 1e4, 1e5], [2e-6 + 1e-9 * n for n in (1e3, 1e4, 1e5)])
    assert (cost.alpha, cost.beta) == (pytest.approx(2e-6), pytest.approx(1e-9))
    assert cost.of(1e5).seconds(0.5) == pytest.approx(cost.seconds(5e4))
    assert fit_cost([1, 2], [2.0, 1.0]).beta == 0  # faster with more: noise


@pytest.mark.parametrize("bad", [([1], [1.0]), ([1, 1], [1.0, 2.0]), ([1, 2], [0.0, 1.0])])
def test_fit_cost_of_too_few_measurements_raises(bad):
    with pytest.raises(ValueError, match="a cost needs times above 0 for at least two amounts"):
        fit_cost(*bad)


def test_negative_cost_raises():
    with pytest.raises(ValueError, match=r"alpha=-1.0 and beta=0.0 .* must not be negative"):
        ChunkCost(alpha=-1.0, beta=0.0)
