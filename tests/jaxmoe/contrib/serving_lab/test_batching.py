# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each batching policy has its defining property."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.batching.semi_pd import direction
from jaxmoe.contrib.serving_lab.layers import LayersPiece
from jaxmoe.contrib.serving_lab.shares import Lane, LanesInstance, LanesPlan, lanes_of
from jaxmoe.contrib.serving_lab.simulation import Arrival, Roofline
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve import (
    Facts,
    LatencyObjective,
    PlanError,
    PromptPiece,
    Request,
    Sampling,
    Shapes,
)
from jaxmoe.serve.facts import WorkPart
from tests.support.page_executor import answer, serve
from tests.support.simulated import COST, FACTS, OBJECTIVE, ONE_LANE, SIZES, arrivals, simulated


def request(id_, prompt, tokens=3, **fields):
    prompt = tuple(range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(id=id_, prompt=prompt, sampling=Sampling(max_tokens=tokens), **fields)


def arrival(id_, prompt, time=0.0, tokens=3, **fields):
    one = request(id_, (1000 * id_ + i for i in range(prompt)), tokens, **fields)
    return Arrival(request=one, time=time, answer=(7,) * tokens)


def planned(policy, requests, *, now=0.0, facts=None, **fields):
    """Return the first plan of a policy for requests that have just arrived."""
    facts = dataclasses.replace(FACTS, **(facts or {}))
    if "partitions" in EVERY_BATCHING[policy].needs:
        facts = dataclasses.replace(facts, steps_at_once=2)
    instance = LanesInstance(facts, policy)
    for one in requests:
        instance.submit(one, now)
    return EVERY_BATCHING[policy](**fields).build(facts)(instance.view(now))


def lanes(simulation):
    return [lane for _, plan in simulation.plans for lane in lanes_of(plan)]


@pytest.mark.parametrize("name", EVERY_BATCHING)
def test_one_request_alone_waits_for_its_prompt_only(name):
    simulation = simulated(
        name, [arrival(0, 300)], fields={"patience": 0.0} if name == "laps" else {}
    )
    one = simulation.sequences[0]
    parts = [[WorkPart(300, 0)]]
    if name == "flow_prefill":
        parts = [[WorkPart(300, 0, (i, i + 3))] for i in (0, 3, 6, 9)]
    share = 0.5 if "partitions" in EVERY_BATCHING[name].needs else 1.0
    expected = sum(COST.seconds(p, share=share) for p in parts)
    if name == "nexus":  # nothing decodes: prompts get the largest share
        assert one.first - one.arrived == pytest.approx(COST.seconds(parts[0], share=0.9))
    elif name == "nano_batches":
        assert one.first - one.arrived <= expected
    else:
        assert one.first - one.arrived == pytest.approx(expected)


@pytest.mark.parametrize("name", ["split_fuse", "batch_llm", "nano_batches"])
def test_a_step_has_at_most_the_tokens_of_its_budget(name):
    simulation = simulated(name, arrivals(rate=1000.0), fields={"budget": 40})
    assert max(lane.num_tokens for lane in lanes(simulation)) == 40


def test_split_fuse_composes_short_prompts_and_splits_long_ones():
    plan = planned("split_fuse", [request(0, 30), request(1, 30), request(2, 90)], budget=100)
    assert plan.pieces == (PromptPiece(0, 30), PromptPiece(1, 30), PromptPiece(2, 40))


def test_split_fuse_keeps_to_compiled_shapes():
    shapes = Shapes(singles=4, pieces=((1, 64), (3, 16)))
    plan = planned("split_fuse", [request(0, 10), request(1, 90)], facts={"shapes": shapes})
    assert plan.pieces == (PromptPiece(0, 10), PromptPiece(1, 16))


def test_prefill_first_never_decodes_beside_a_prompt():
    simulation = simulated("prefill_first", arrivals(rate=200.0))
    assert all(not lane.singles or not lane.pieces for lane in lanes(simulation))


def test_prefill_first_computes_a_prompt_beyond_its_budget_alone():
    plan = planned("prefill_first", [request(0, 200), request(1, 10)], budget=100)
    assert plan.pieces == (PromptPiece(0, 200),)


def test_layered_reads_fewer_expert_bytes_than_chunks_of_the_same_work():
    given = [arrival(i, 600, tokens=2) for i in range(3)]
    layered = simulated("layered", given, fields={"chunk": 100})
    chunked = simulated("split_fuse", given, fields={"budget": 100})
    assert layered.expert_bytes < chunked.expert_bytes
    assert layered.num_computed == chunked.num_computed


def test_layered_runs_a_prompt_through_each_layer_once():
    simulation = simulated("layered", [arrival(0, 600)], fields={"chunk": 100})
    pieces = [piece for lane in lanes(simulation) for piece in lane.pieces]
    assert [piece.count for piece in pieces] == [600] * 6
    assert [piece.layers for piece in pieces] == [(i, i + 2) for i in range(0, 12, 2)]


def test_layered_decodes_while_a_prompt_is_underway():
    given = [arrival(0, 20, tokens=30), arrival(1, 600, time=1e-3)]
    simulation = simulated("layered", given, fields={"chunk": 100})
    underway = [lane for lane in lanes(simulation) if any(p.id == 1 for p in lane.pieces)]
    assert len(underway) == 6 and sum(lane.singles == (0,) for lane in underway) >= 5


def test_laps_serves_a_short_prompt_within_its_patience_of_a_long_one():
    given = [arrival(0, 4000, tokens=2), arrival(1, 50, time=1e-3, tokens=2)]
    fields = {"budget": 512, "patience": 0.002}
    laps = simulated("laps", given, fields=fields).sequences[1]
    plain = simulated("prefill_first", given).sequences[1]
    assert laps.first - laps.arrived < plain.first - plain.arrived
    longest = COST.seconds([WorkPart(512, 3500), WorkPart(50, 0)])
    assert laps.admitted - laps.arrived <= 0.002 + 2 * longest


def test_laps_waits_for_other_short_prompts_and_says_when_it_stops_waiting():
    plan = planned("laps", [request(0, 10)], now=1.0)
    assert plan.num_tokens == 0 and plan.wake == pytest.approx(1.01)
    full = planned("laps", [request(i, 10) for i in range(6)], border=50, budget=60)
    assert len(full.pieces) == 6 and full.wake is None


def test_flow_prefill_computes_the_least_slack_first():
    slow, fast = LatencyObjective(ttft=9.0), LatencyObjective(ttft=0.1)
    plan = planned("flow_prefill", [request(0, 50, objective=slow), request(1, 60, objective=fast)])
    assert plan.pieces == (LayersPiece(1, 60, (0, 3)),)


def test_flow_prefill_leaves_a_prompt_between_layers_for_an_urgent_one():
    slow, fast = LatencyObjective(ttft=9.0), LatencyObjective(ttft=0.01)
    given = [
        arrival(0, 3000, objective=slow, tokens=1),
        arrival(1, 30, time=1e-4, objective=fast, tokens=1),
    ]
    simulation = simulated("flow_prefill", given)
    pieces = [(p.id, p.layers) for lane in lanes(simulation) for p in lane.pieces]
    assert pieces == [
        (0, (0, 3)),
        *((1, (i, i + 3)) for i in range(0, 12, 3)),
        *((0, (i, i + 3)) for i in range(3, 12, 3)),
    ]


@pytest.mark.parametrize("together", [True, False])
def test_batch_llm_computes_each_node_of_the_trie_once(together):
    shared, page = tuple(range(48)), 16
    prompts = [shared + (100 + i,) * 20 for i in range(4)] + [(500 + i,) * 20 for i in range(2)]
    given = [
        Arrival(request=request(i, prompt, 1), time=0.0 if together else 0.01 * i, answer=(7,))
        for i, prompt in enumerate(prompts)
    ]
    simulation = simulated("batch_llm", given)
    trie = len(shared) + 4 * 20 + 2 * 20
    assert simulation.num_computed == trie
    assert simulation.num_cached == 3 * len(shared) // page * page
    if together:
        assert simulated("split_fuse", given).num_computed > trie


def test_batch_llm_begins_with_the_group_of_the_largest_share_of_decoding():
    requests = [request(0, (1,) * 32, tokens=2), request(1, (2,) * 32, tokens=50)]
    plan = planned("batch_llm", requests, budget=32)
    assert [piece.id for piece in plan.pieces] == [1]


def test_batch_llm_admits_by_the_tokens_that_stay():
    requests = [request(i, (i,) * 32, tokens=100) for i in range(3)]
    plan = planned("batch_llm", requests, facts={"num_pages": 300}, held=0.03)
    assert len(plan.admit) == 1


def test_nexus_takes_the_share_with_the_least_predicted_latency():
    plan = planned("nexus", [request(0, 2000)])
    (lane,) = plan.lanes
    assert (lane.number, lane.share) == (1, pytest.approx(0.9))


def test_lanes_run_at_once_and_share_one_pool():
    simulation = simulated("semi_pd", arrivals(rate=100.0))
    assert {lane.number for lane in lanes(simulation)} == {0, 1}
    assert all(not lane.pieces for lane in lanes(simulation) if lane.number == 0)
    assert all(not lane.singles for lane in lanes(simulation) if lane.number == 1)
    busy = simulation.busy_seconds[0]
    assert busy > simulation.now - 0.25  # more than one lane could do


@pytest.mark.parametrize(
    ("ttft", "tpot", "expected"), [(0.0, 9.0, -1), (9.0, 0.0, 1), (9.0, 9.0, 0)]
)
def test_semi_pd_moves_towards_the_phase_that_misses_its_limit(ttft, tpot, expected):
    given = arrivals(requests=6, objective=LatencyObjective(ttft=ttft, tpot=tpot))
    simulation = simulated("semi_pd", given, fields={"every": 2})
    assert direction(tuple(simulation.sequences.values())) == expected
    shares = [lane.share for lane in lanes(simulation) if lane.number == 0]
    assert (max(shares) > 0.5, min(shares) < 0.5) == (expected > 0, expected < 0)


def test_a_share_that_the_device_does_not_have_is_refused():
    instance = LanesInstance(FACTS, "wrong")
    with pytest.raises(PlanError, match=r"share=1\.5 of lane 0") as error:
        instance.start(LanesPlan(lanes=(Lane(share=1.5),)), 0.0)
    assert (error.value.policy, error.value.rule) == ("wrong", "share")


def test_lanes_that_are_not_free_are_refused():
    instance = LanesInstance(FACTS, "wrong")
    with pytest.raises(PlanError, match=r"lanes \[0, 1\] of the free ones \[0\]") as error:
        instance.start(LanesPlan(lanes=(Lane((0,)), Lane((1,), number=1))), 0.0)
    assert (error.value.policy, error.value.rule) == ("wrong", "lane")


def test_nano_batches_are_as_many_as_is_fastest():
    simulation = simulated("nano_batches", [arrival(0, 2000, tokens=2)])
    prompt, decoding = lanes(simulation)[0], lanes(simulation)[-1]
    part = [WorkPart(2000, 0)]
    seconds = {n: COST.seconds(part, nano_batches=n) for n in (1, 2, 3, 4)}
    assert seconds[prompt.nano_batches] == min(seconds.values())
    assert decoding.nano_batches == 1  # weights would be read twice


@pytest.mark.parametrize("name", ONE_LANE)
def test_answers_on_pages_do_not_depend_on_the_policy(name):
    facts = Facts(
        num_pages=14,
        page_size=4,
        max_running=3,
        max_length=40,
        num_layers=12,
        capabilities=frozenset({"pages", "layers"}),
        cost=Roofline(sizes=SIZES, chip=CHIPS["v5e"]),
    )
    requests = [
        (i // 2, request(i, range(i % 3, 9 + 2 * i), 4 + i, objective=OBJECTIVE)) for i in range(6)
    ]
    streams, _ = serve(LanesInstance(facts, name), EVERY_BATCHING[name]().build(facts), requests)
    assert streams.tokens == {r.id: answer(r, 40) for _, r in requests}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("split_fuse", {"budget": 0}),
        ("prefill_first", {"budget": 0}),
        ("layered", {"chunk": 0}),
        ("laps", {"budget": 100}),
        ("flow_prefill", {"stops": 0}),
        ("batch_llm", {"held": 0.0}),
        ("nexus", {"weight": 0.0}),
        ("semi_pd", {"step": 0.5}),
        ("nano_batches", {"most": 0}),
    ],
)
def test_values_that_mean_nothing_are_refused(name, fields):
    (field,) = fields
    with pytest.raises(ValueError, match=f"{field}={fields[field]}"):
        EVERY_BATCHING[name](**fields)
