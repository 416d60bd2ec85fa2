# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each dispatch policy has its defining property."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from jaxmoe.contrib.fleet.dispatch import DISPATCH
from jaxmoe.contrib.fleet.dispatch.base import Route
from jaxmoe.contrib.fleet.dispatch.llumnix import freeness
from jaxmoe.contrib.serving_lab.caches import ITEM_CACHES, Use, replay
from jaxmoe.contrib.serving_lab.shares import LanesInstance
from jaxmoe.contrib.serving_lab.simulation import Arrival, Simulation, measure
from jaxmoe.serve import BATCHING, LatencyObjective, Request, Sampling
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.requests import Refusal
from tests.support.simulated import COST, FACTS, SIZES, arrivals


def arrival(id_, prompt, time=0.0, tokens=3, ttft=9.0):
    request = Request(
        id=id_,
        prompt=tuple(prompt),
        sampling=Sampling(max_tokens=tokens),
        objective=LatencyObjective(ttft=ttft),
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
        keeps_plans=True,
        keeps_sequences=True,
    )
    place = simulation.fleet._dispatcher.place

    def noted(request, view):
        if (route := place(request, view)) is not None:
            routes[request.id] = route
        return route

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


@pytest.mark.parametrize("name", [n for n in DISPATCH if n not in ("dist_serve", "pd_serve")])
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


@pytest.mark.parametrize("name", ["dist_serve", "pd_serve"])
def test_no_answer_is_written_where_prompts_are_computed(name):
    simulation, routes = fleet(name, arrivals(rate=200.0), 3)
    first = simulation.fleet.roles.index("decode")
    for number, plan in simulation.plans:
        if number < first:
            assert not plan.singles
        else:
            assert not plan.pieces
    assert {route.decode for route in routes.values()} == set(range(first, 3))
    assert simulation.num_moves == sum(len(a.answer) > 1 for a in arrivals(rate=200.0))


@pytest.mark.parametrize(("prefill", "instances"), [(0, 1), (3, 3)])
def test_dist_serve_needs_an_instance_for_each_phase(prefill, instances):
    with pytest.raises(ValueError, match="must leave at least one for each phase"):
        DISPATCH["dist_serve"](prefill=prefill).roles(instances)


def test_pd_serve_has_no_queue_where_prompts_are_computed():
    given = [arrival(i, range(100 * i, 100 * i + 400), time=1e-4 * i) for i in range(8)]
    routes, queued, offered = {}, [], []
    simulation = simulated_fleet(given, DISPATCH["pd_serve"](), 3, None, routes)
    start = simulation.fleet.start

    def noted(number, now):
        found = start(number, now)
        if simulation.fleet.roles[number] == "prefill":
            instance = simulation.fleet.instances[number]
            queued.append(len(instance.queues.waiting))
            assert len(instance.queues.running) <= 1
            offered.append(len(simulation.fleet.offered))
        return found

    simulation.fleet.start = noted
    simulation.run()
    assert max(queued) == 0 and max(offered) > 0 and not simulation.fleet.offered
    first = [simulation.sequences[i].first for i in range(8)]
    assert first == sorted(first)  # the oldest is offered first
    assert simulation.sequences[7].arrived == given[7].time


def test_pd_serve_refuses_and_cancels_what_no_instance_has_accepted(monkeypatch):
    given = [arrival(i, range(100 * i, 100 * i + 400)) for i in range(3)]
    simulation = simulated_fleet(given, DISPATCH["pd_serve"](), 2, None, {})
    running = simulation.fleet
    for one in given:
        assert running.submit(one.request, 0.0) == ()
    assert set(running.offered) == {1, 2}
    (end,) = running.submit(arrival(3, range(5000)).request, 0.0)
    assert end.reason == "refused"
    (end,) = running.cancel(1)
    assert end.reason == "cancelled" and set(running.offered) == {2}
    # Whatever the queue of an instance, which it has never entered.
    refusal = Refusal("queue_full", "1 request is waiting already")
    monkeypatch.setattr(type(running.instances[0]), "refusal", lambda self, request: refusal)
    (end,) = running.cancel(2)
    assert end.reason == "cancelled" and not running.offered
    running.check_pages()


@pytest.mark.parametrize(("seconds", "prefill"), [((1, 1), 4), ((3, 1), 6), ((1, 99), 1)])
def test_pd_serve_has_roles_in_the_ratio_of_measured_times(seconds, prefill):
    config = DISPATCH["pd_serve"]().after_pilot(
        lambda: dict(zip(("prefill", "decode"), seconds, strict=True))
    )
    assert config.roles(8).count("prefill") == prefill
    with pytest.raises(ValueError, match="must leave at least one for each phase"):
        config.roles(1)


def test_prfaas_goes_away_exactly_when_the_way_back_is_shorter_than_the_queue():
    given = [arrival(i, range(300 * i, 300 * i + 50 * (i % 5 + 1)), 2e-4 * i) for i in range(16)]
    config, compared = DISPATCH["prfaas"](remote=2), []
    simulation = simulated_fleet(given, config, 3, None, {})
    dispatcher = simulation.fleet._dispatcher
    place = dispatcher.place

    def noted(request, view):
        route, cost = place(request, view), simulation.scaling.costs[0]
        local = dispatcher.seconds(request, view, 0)
        away = []
        for number in (1, 2):
            alone = dataclasses.replace(view, roles=("both",) * 3)
            size = len(request.prompt) * cost.sizes.kv_bytes
            away.append(
                dispatcher.seconds(request, alone, number)
                + config.latency
                + size / cost.chip.far_bandwidth
                + view.backlog[number]
            )
        assert (route.prefill != 0) == (min(away) < local)
        assert route.decode in (0, None)
        compared.append((min(away), local, max(view.backlog)))
        return route

    dispatcher.place = noted
    simulation.run()
    assert len({away < local for away, local, _ in compared}) == 2
    chosen = sum(min(away, local) for away, local, _ in compared)
    assert chosen <= sum(local for _, local, _ in compared)


def test_copies_over_a_link_are_sent_one_after_the_other():
    given = [arrival(i, range(300 * i, 300 * i + 200)) for i in range(6)]
    slow = dataclasses.replace(COST.chip, far_bandwidth=2e8)
    cost = dataclasses.replace(COST, chip=slow)
    simulation = Simulation(
        given,
        FACTS,
        BATCHING["split_fuse"](),
        cost,
        num_instances=2,
        dispatch=DISPATCH["dist_serve"](),
        keeps_sequences=True,
    ).run()
    sent = 6 * 200 * SIZES.kv_bytes / slow.far_bandwidth
    assert simulation.now > sent and set(simulation.sequences) == set(range(6))


@pytest.mark.parametrize(
    ("name", "pages"), [*((name, 48) for name in DISPATCH), ("dist_serve", 24), ("dist_serve", 96)]
)
def test_each_eviction_has_a_step_since_the_admission(name, pages, monkeypatch):
    """Where pages are short, sequences that move hold theirs: what is admitted computes."""
    fresh, evicted = set(), []
    admit, restore, evict, work = (
        getattr(LanesInstance, f"_{verb}") for verb in ("admit", "restore", "evict", "work")
    )

    def admitting(self, one, *given):
        fresh.add((id(self), one.id))
        return admit(self, one, *given)

    def restoring(self, id_):
        fresh.add((id(self), id_))
        return restore(self, id_)

    def evicting(self, id_, kind):
        assert (id(self), id_) not in fresh, f"{id_} was evicted without a step"
        evicted.append(id_)
        return evict(self, id_, kind)

    def working(self, id_, *given):
        fresh.discard((id(self), id_))
        return work(self, id_, *given)

    for verb, function in {
        "admit": admitting,
        "restore": restoring,
        "evict": evicting,
        "work": working,
    }.items():
        monkeypatch.setattr(LanesInstance, f"_{verb}", function)
    given = arrivals(rate=60.0, requests=80, prompt_median=100.0, answer_median=60.0)
    facts = dataclasses.replace(FACTS, num_pages=pages, max_length=16 * pages)
    fitting = [
        one
        for one in given
        if len(one.request.prompt) + one.request.sampling.max_tokens < facts.max_length
    ]
    simulation = Simulation(
        fitting,
        facts,
        BATCHING["split_fuse"](),
        COST,
        num_instances=2,
        dispatch=DISPATCH[name](),
        keeps_sequences=True,
    ).run()
    assert set(simulation.sequences) == {one.request.id for one in fitting}
    assert len(evicted) < len(fitting)


def workflows(pause, rate=4.0, **fields):
    given = {"requests": 12, "turns": 3, "rate": rate, "pause": pause, **fields}
    return arrivals("sessions", prompt_median=200.0, answer_median=40.0, **given)


def test_saga_keeps_a_workflow_at_its_instance():
    given = workflows(0.2, rate=12.0)
    simulation, routes = fleet("saga", given, 2)
    homes = collections.defaultdict(set)
    for one in given:
        homes[one.request.session].add(routes[one.request.id].prefill)
    assert {len(found) for found in homes.values()} == {1} and simulation.num_moves == 0
    assert set.union(*homes.values()) == {0, 1}


def test_saga_steals_whole_workflows_and_later_calls_follow():
    given = []
    for session in range(4):
        for call in range(2):
            id_ = 2 * session + call
            one = arrival(id_, range(1000 * id_, 1000 * id_ + 900), tokens=30)
            request = dataclasses.replace(one.request, session=f"w{session}")
            given.append(dataclasses.replace(one, request=request))
    later = arrival(8, range(50), time=0.5)
    given.append(
        dataclasses.replace(later, request=dataclasses.replace(later.request, session="w3"))
    )
    routes = {}
    simulation = simulated_fleet(given, DISPATCH["saga"](), 2, {"max_running": 2}, routes)
    dispatcher = simulation.fleet._dispatcher
    dispatcher._homes = {f"w{session}": 0 for session in range(4)}  # the other one is at rest
    taken, rebalance = [], dispatcher.rebalance

    def noted(view):
        moves = rebalance(view)
        waiting = {one.id for member in view.members for one in member.waiting}
        for move in moves:
            pair = {move.id - move.id % 2, move.id - move.id % 2 + 1}
            assert {other.id for other in moves} >= pair & waiting
        taken.extend(moves)
        return moves

    dispatcher.rebalance = noted
    simulation.run()
    stolen = {move.id // 2 for move in taken}
    assert stolen and len(taken) == 2 * len(stolen) and set(simulation.sequences) == set(range(9))
    assert routes[8].prefill == int(3 in stolen)


def test_saga_finds_another_home_when_its_own_has_drained():
    simulation = simulated_fleet([arrival(0, (1,))], DISPATCH["saga"](), 2, None, {})
    running = simulation.fleet
    running._dispatcher._homes = {"w": 1}
    running.num_open = 1
    request = dataclasses.replace(arrival(5, (1, 2)).request, session="w")
    assert running._dispatcher.place(request, running.view(0.0)) == Route(0)
    assert running._dispatcher._homes == {"w": 0}


def test_saga_keeps_pages_exactly_when_they_are_worth_their_rent():
    simulation = simulated_fleet([], DISPATCH["saga"](rent=0.012), 1, None, {})
    saga, view = simulation.fleet._dispatcher, simulation.fleet.instances[0].view(0.0)
    again = COST.seconds([WorkPart(1600)])
    # Seconds of a pause after which 100 of the 600 pages have cost as much.
    worth = again / (0.012 * 100 / 600)
    assert saga.is_worth(view, 1600, 1.0, 0.99 * worth)
    assert not saga.is_worth(view, 1600, 1.0, 1.01 * worth)
    assert not saga.is_worth(view, 1600, 0.5, 0.99 * worth)


@pytest.mark.parametrize("rent", [0.0, 0.01, 1.0])
def test_saga_misses_at_least_what_belady_misses(rent):
    """Uses are the pages that each call reads or writes; one call at a time."""
    given = workflows(5.0, rate=0.5, requests=15, seed=3)
    pages = 80
    simulation, _ = fleet(
        "saga", given, 1, facts={"num_pages": pages, "max_length": 16 * pages}, rent=rent
    )
    trace, missed = [], 0
    done = sorted(simulation.sequences.values(), key=lambda one: one.admitted)
    assert all(a.last <= b.admitted for a, b in zip(done[:-1], done[1:], strict=True))
    for one in done:
        names = one.names()[: (len(one.tokens) - 1) // one.page_size]
        trace += [Use(item=name) for name in names]
        missed += len(names) - one.cached // one.page_size
    bound = replay(trace, ITEM_CACHES["belady"](), pages)
    assert missed >= bound.hits.count(False) > 0
    assert len({use.item for use in trace}) > pages  # the pool is too small for all
