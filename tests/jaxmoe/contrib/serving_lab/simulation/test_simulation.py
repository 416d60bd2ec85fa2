# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The simulator: costs, metamorphic properties, and the same plans as with an executor."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.layers import LayersInstance
from jaxmoe.contrib.serving_lab.simulation import Arrival, ModelSizes, Simulation, measure
from jaxmoe.models.presets import PRESETS
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve import Facts, LatencyObjective, Plan, Request, Sampling
from jaxmoe.serve.facts import WorkPart
from tests.support.page_executor import answer, serve
from tests.support.simulated import (
    COST,
    FACTS,
    OBJECTIVE,
    ONE_LANE,
    SIZES,
    Ticks,
    arrivals,
    simulated,
)


def test_the_sizes_of_a_published_model():
    sizes = ModelSizes.of(PRESETS["qwen3_30b_a3b"]())
    assert (sizes.num_experts, sizes.top_k, sizes.moe_layers) == (128, 8, 48)
    assert sizes.expert == 3 * 2048 * 768
    assert sizes.kv_bytes == 48 * 2 * 4 * 128 * 2
    assert sizes.pair_flops == 48 * 4 * 32 * 128
    assert sizes.head == 151936 * 2048
    assert abs(sizes.total / 30.2e9 - 1) < 0.01


def test_one_decoded_token_reads_all_weights_that_it_meets():
    cost = dataclasses.replace(COST, constant=0.0)
    found = cost.cost([WorkPart(1, 0)])
    read = 2 * (SIZES.dense + SIZES.head + 12 * 4 * SIZES.expert) + SIZES.kv_bytes
    expected = read / (0.8 * CHIPS["v5e"].memory_bandwidth)
    assert abs(found.seconds / expected - 1) < 1e-3
    assert found.expert_bytes == pytest.approx(2 * 12 * 4 * SIZES.expert)


def test_a_long_prompt_is_bound_by_flops_and_reads_every_expert():
    cost = dataclasses.replace(COST, constant=0.0)
    found = cost.cost([WorkPart(4000, 0)])
    active = SIZES.dense + 12 * SIZES.top_k * SIZES.expert
    flops = 2 * 4000 * active + SIZES.pair_flops * 4000 * 2000 + 2 * SIZES.head
    assert found.flops == pytest.approx(flops)
    assert found.expert_bytes == pytest.approx(2 * 12 * 32 * SIZES.expert)
    assert found.seconds >= flops / (CHIPS["v5e"].flops * CHIPS["v5e"].efficiency)


def test_layers_of_a_piece_cost_their_share_and_the_head_is_paid_once():
    parts = [WorkPart(500, 0, layers) for layers in ((0, 4), (4, 12))]
    cost = dataclasses.replace(COST, constant=0.0)
    whole = cost.cost([WorkPart(500, 0)])
    split = [cost.cost([part]) for part in parts]
    assert sum(one.expert_bytes for one in split) == pytest.approx(whole.expert_bytes)
    assert sum(one.flops for one in split) == pytest.approx(whole.flops)


def test_uneven_loads_read_fewer_experts():
    layer = (0.2, 0.2, *(0.6 / 30,) * 30)
    uneven = dataclasses.replace(COST, loads=(layer, layer))
    assert uneven.distinct_experts(8) < COST.distinct_experts(8)
    even = dataclasses.replace(COST, loads=((1 / 32,) * 32,))
    assert even.distinct_experts(8) == pytest.approx(COST.distinct_experts(8))
    mixed = dataclasses.replace(COST, loads=(layer, even.loads[0]))
    each = (uneven.distinct_experts(8), even.distinct_experts(8))
    assert mixed.distinct_experts(8) == pytest.approx(sum(each) / 2)


def test_host_memory_that_is_not_needed_costs_nothing():
    slow, fast = (
        dataclasses.replace(COST, chip=dataclasses.replace(CHIPS["v5e"], host_bandwidth=b))
        for b in (1e9, 32e9)
    )
    assert slow.spill_share == 0 and slow.seconds([WorkPart(9, 9)]) == COST.seconds(
        [WorkPart(9, 9)]
    )
    small = dataclasses.replace(CHIPS["v5e"], memory=2**30, reserved=0)
    slow, fast = (
        dataclasses.replace(COST, chip=dataclasses.replace(small, host_bandwidth=b))
        for b in (1e9, 32e9)
    )
    assert 0 < slow.spill_share < 1
    assert (
        slow.seconds([WorkPart(9, 9)])
        > fast.seconds([WorkPart(9, 9)])
        > COST.seconds([WorkPart(9, 9)])
    )
    held = (1 - slow.spill_share) * slow.weight_bytes
    pages = slow.num_pages(16, share=1.0) * 16 * SIZES.kv_bytes
    assert held == pytest.approx(0.9 * 2**30)  # the rest is for pages
    assert held + pages <= 2**30 < held + pages + 16 * SIZES.kv_bytes


def test_more_chips_are_faster_and_send():
    two = dataclasses.replace(COST, num_chips=2)
    parts = [WorkPart(512, 0)]
    assert COST.seconds(parts) / 2 < two.seconds(parts) < COST.seconds(parts)
    assert two.num_pages(16) > 2 * COST.num_pages(16)


def test_without_limits_every_request_is_within_them():
    found = measure(simulated(given=arrivals(objective=LatencyObjective())))
    assert found.within == 1.0 and found.finished == 12
    assert found.goodput == pytest.approx(12 / found.seconds)


@pytest.mark.parametrize("policy", EVERY_BATCHING)
def test_a_faster_chip_and_more_instances_never_lower_goodput(policy):
    given = arrivals(rate=200.0, requests=8)
    chip = dataclasses.replace(CHIPS["v5e"], flops=4e14, memory_bandwidth=2e12)
    fields = {"patience": 0.0} if policy == "laps" else {}  # else it waits for a full batch
    slow = measure(simulated(policy, given, fields=fields))
    cost = dataclasses.replace(COST, chip=chip)
    fast = measure(simulated(policy, given, fields=fields, cost=cost))
    two = measure(simulated(policy, given, fields=fields, num_instances=2))
    assert fast.goodput >= slow.goodput and two.goodput >= slow.goodput


@pytest.mark.parametrize("policy", EVERY_BATCHING)
def test_everything_is_served_and_the_pages_are_free_again(policy):
    given = arrivals(rate=400.0, prefixes=2, prefix_tokens=40)
    simulation = simulated(policy, given, facts={"num_pages": 60, "max_length": 960})
    assert set(simulation.sequences) == set(range(12))
    for instance in simulation.fleet.instances:
        instance.check_pages()
        assert instance.pool.num_free == 60
    for arrival in given:
        written = simulation.sequences[arrival.request.id].tokens
        assert tuple(written) == arrival.request.prompt + arrival.answer


def test_later_turns_find_the_earlier_ones_in_the_pool():
    given = arrivals("sessions", requests=6, turns=3, rate=2.0)
    simulation = simulated(given=given, facts={"num_pages": 4000})
    for arrival in given:
        if arrival.after is not None:
            before = next(a for a in given if a.request.id == arrival.after)
            said = len(before.request.prompt) + len(before.answer) - 1
            assert simulation.sequences[arrival.request.id].cached == said // 16 * 16


@pytest.mark.parametrize("policy", ONE_LANE)
def test_the_plans_are_those_of_an_executor_on_pages(policy):
    """The simulator cannot drift from the engine: equal arrivals and clock give equal plans."""
    config = EVERY_BATCHING[policy](**({"patience": 0.0} if policy == "laps" else {}))
    cost = Ticks(sizes=SIZES, chip=CHIPS["v5e"])
    facts = Facts(
        num_pages=12,
        page_size=4,
        max_running=4,
        max_length=40,
        num_layers=12,
        capabilities=frozenset({"pages", "layers"}),
        cost=cost,
    )
    requests = [
        (
            id_ // 2,
            Request(
                id=id_,
                prompt=tuple(range(id_ % 3, id_ % 3 + 9 + id_)),
                sampling=Sampling(max_tokens=3 + id_),
                objective=OBJECTIVE,
            ),
        )
        for id_ in range(7)
    ]
    _, plans = serve(LayersInstance(facts, policy), config.build(facts), requests)
    given = [
        Arrival(request=r, time=float(time), answer=tuple(answer(r, 40))) for time, r in requests
    ]
    simulation = Simulation(given, facts, config, cost, keeps_plans=True).run()
    assert [plan for _, plan in simulation.plans] == [plan for plan in plans if plan.num_tokens]


def test_an_executor_whose_steps_overlap_is_simulated_as_any_other():
    """Its properties are those of a measured simulation."""
    ahead = dataclasses.replace(FACTS, steps_ahead=1)
    one, other = (
        Simulation(arrivals(requests=20), facts, EVERY_BATCHING["split_fuse"](), COST).run()
        for facts in (FACTS, ahead)
    )
    assert one.answers.num_written == other.answers.num_written > 0
    assert one.now == other.now


def test_a_policy_that_never_plans_is_named():
    simulation = Simulation(arrivals(requests=2), FACTS, EVERY_BATCHING["split_fuse"](), COST)
    simulation.fleet._policies = [lambda view: Plan()]
    with pytest.raises(RuntimeError, match="policy 'split_fuse' left 2 requests unserved"):
        simulation.run()
