# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each dispatch policy has its defining property."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from jaxmoe.serve import BATCHING, Objective, Request, Sampling
from jaxmoe.serve.policies.dispatch import DISPATCH
from jaxmoe.serve.policies.dispatch.base import Route
from jaxmoe.serve.policies.dispatch.llumnix import freeness
from jaxmoe.serve.simulation import Arrival, Simulation, measure
from tests.support.simulated import COST, FACTS, arrivals


def arrival(id_, prompt, time=0.0, tokens=3, ttft=9.0):
    request = Request(
        id=id_,
        prompt=tuple(prompt),
        sampling=Sampling(max_tokens=tokens),
        objective=Objective(ttft=ttft),
    )
    return Arrival(request=request, time=time, answer=(7,) * tokens)


def fleet(name, given, num_instances=3, *, facts=None, **fields):
    """Run a fleet; return the simulation and every route by request."""
    routes = {}
    config = DISPATCH[name](**fields)
    simulation = simulated_fleet(given, config, num_instances, facts, routes)
    return simulation.run(), routes


def simulated_fleet(given, config, num_instances, facts, routes):
    simulation = Simulation(
        given,
        dataclasses.replace(FACTS, **(facts or {})),
        BATCHING["split_fuse"](),
        COST,
        num_instances=num_instances,
        dispatch=config,
    )
    place = simulation.fleet._dispatcher.place

    def noted(request, view):
        routes[request.id] = place(request, view)
        return routes[request.id]

    simulation.fleet._dispatcher.place = noted
    return simulation


@pytest.mark.parametrize("name", DISPATCH)
def test_every_request_is_served_once_and_all_pages_are_free_again(name):
    given = arrivals(rate=400.0, prefixes=2, prefix_tokens=40)
    simulation, _ = fleet(name, given)
    assert set(simulation.sequences) == set(range(12))
    for one in given:
        written = simulation.sequences[one.request.id].tokens
        assert tuple(written) == one.request.prompt + one.answer
    for instance in simulation.fleet.instances:
        instance.check_pages()
        assert instance.pool.num_free == 600


@pytest.mark.parametrize("name", [name for name in DISPATCH if name != "dist_serve"])
def test_one_instance_alone_serves_everything(name):
    simulation, _ = fleet(name, arrivals(), 1)
    assert measure(simulation).finished == 12 and simulation.num_moves == 0


def test_round_robin_goes_round():
    _, routes = fleet("round_robin", [arrival(i, (i, 1)) for i in range(6)])
    assert [routes[i].prefill for i in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_avoids_the_long_prompt():
    given = [arrival(0, range(2000)), arrival(1, range(5)), arrival(2, range(6)), arrival(3, (9,))]
    _, routes = fleet("least_loaded", given, 2)
    assert [routes[i].prefill for i in range(4)] == [0, 1, 1, 1]


def test_prefix_aware_returns_to_the_cached_beginning():
    shared = tuple(range(64))
    given = [arrival(i, (*shared, 100 + i), time=0.1 * i) for i in range(4)]
    simulation, routes = fleet("prefix_aware", given)
    assert len({route.prefill for route in routes.values()}) == 1
    assert simulation.num_cached == 3 * 64


def test_prefix_aware_leaves_the_cache_when_the_load_is_uneven():
    shared = tuple(range(64))
    given = [arrival(i, (*shared, 100 + i), time=1.0 if i else 0.0, tokens=40) for i in range(8)]
    _, routes = fleet("prefix_aware", given, 2, imbalance=3)
    counts = collections.Counter(routes[i].prefill for i in range(1, 8))
    assert max(counts.values()) - min(counts.values()) <= 4 and len(counts) == 2


def test_dual_map_has_two_candidates_which_the_beginning_decides():
    dispatcher = DISPATCH["dual_map"](prefix=16).build()
    seen = collections.Counter()
    for i in range(200):
        beginning = tuple(range(i, i + 16))
        pairs = {dispatcher.candidates(Request(id=j, prompt=(*beginning, j)), 8) for j in range(2)}
        ((first, second),) = pairs
        assert first != second
        seen.update((first, second))
    assert set(seen) == set(range(8))


def test_dual_map_changes_few_candidates_when_an_instance_is_added():
    dispatcher = DISPATCH["dual_map"]().build()
    requests = [Request(id=i, prompt=(i, i + 1)) for i in range(100)]
    kept = sum(dispatcher.candidates(r, 8)[0] == dispatcher.candidates(r, 9)[0] for r in requests)
    assert kept > 70  # on a ring a ninth of the requests moves


def test_dual_map_takes_the_cached_candidate_until_its_wait_breaks_the_promise():
    shared = tuple(range(64))
    given = [arrival(i, (*shared, 100 + i), time=0.1 * i) for i in range(4)]
    _, routes = fleet("dual_map", given)
    assert len({route.prefill for route in routes.values()}) == 1
    late = [arrival(i, (*shared, *range(100 * i, 100 * i + 900)), ttft=0.004) for i in range(4)]
    simulation, routes = fleet("dual_map", late)
    pair = simulation.fleet._dispatcher.candidates(late[0].request, 3)
    assert {route.prefill for route in routes.values()} == set(pair)


def test_llumnix_moves_shrink_the_difference():
    given = [arrival(i, range(50 * i, 50 * i + 60), tokens=60) for i in range(8)]
    differences = []
    config = DISPATCH["llumnix"](threshold=1000.0)
    simulation = simulated_fleet(given, config, 2, {"num_pages": 300}, {})
    simulation.fleet._dispatcher.place = lambda request, view: Route(0)
    rebalance = simulation.fleet._dispatcher.rebalance

    def noted(view):
        moves = rebalance(view)
        for move in moves:
            source, target = view.members[move.source], view.members[move.target]
            pages = len(next(o for o in source.running if o.id == move.id).pages)
            before = freeness(target) - freeness(source)
            after = freeness(target, pages, 1) - freeness(source, -pages, -1)
            differences.append((before, after))
        return moves

    simulation.fleet._dispatcher.rebalance = noted
    simulation.run()
    assert simulation.num_moves == len(differences) > 0
    assert all(abs(after) < before for before, after in differences)
    assert set(simulation.sequences) == set(range(8))


def test_dist_serve_writes_no_answer_where_prompts_are_computed():
    simulation, routes = fleet("dist_serve", arrivals(rate=200.0), 3)
    for number, plan in simulation.plans:
        for lane in plan.lanes:
            if number == 0:
                assert not lane.singles
            else:
                assert not lane.pieces
    assert {route.decode for route in routes.values()} == {1, 2}
    assert simulation.num_moves == sum(len(a.answer) > 1 for a in arrivals(rate=200.0))


@pytest.mark.parametrize(("prefill", "instances"), [(0, 1), (3, 3)])
def test_dist_serve_needs_an_instance_for_each_phase(prefill, instances):
    with pytest.raises(ValueError, match="must leave at least one for each phase"):
        DISPATCH["dist_serve"](prefill=prefill).roles(instances)
