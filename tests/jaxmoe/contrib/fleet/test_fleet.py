# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet places requests as the simulator does, and an engine of several instances loses none."""

from __future__ import annotations

import dataclasses
import threading
from typing import ClassVar

import pytest

from jaxmoe.contrib.fleet.config import FleetConfig
from jaxmoe.contrib.fleet.dispatch import DISPATCH, DispatchConfig, RequestDispatcher
from jaxmoe.contrib.fleet.engine import FleetEngine
from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.layers import LayersInstance
from jaxmoe.contrib.serving_lab.simulation import Arrival, Simulation
from jaxmoe.planning.hardware import CHIPS
from jaxmoe.serve import BATCHING, Facts, Request, Sampling
from jaxmoe.serve.engine import Engine, EngineConfig
from jaxmoe.serve.instance import Instance
from jaxmoe.serve.policies.retention import RETENTION
from tests.support.fleets import PageWorker, Rig
from tests.support.page_executor import answer
from tests.support.simulated import OBJECTIVE, ONE_LANE, SIZES, Ticks

CHIP = dataclasses.replace(CHIPS["v5e"], link_latency=1.0, far_bandwidth=float("inf"))
COST = Ticks(sizes=SIZES, chip=CHIP)
"""Every step and every copy takes one second."""
FACTS = Facts(
    num_pages=14,
    page_size=4,
    max_running=4,
    max_length=40,
    num_layers=12,
    capabilities=frozenset({"pages", "layers"}),
    cost=COST,
)
FREE_SWAPS = dataclasses.replace(
    COST,
    chip=dataclasses.replace(CHIP, link_latency=0.0, host_bandwidth=float("inf")),
)
TIGHT = dataclasses.replace(FACTS, num_pages=10, cost=FREE_SWAPS)
FIELDS = {"llumnix": {"threshold": 100.0}, "dual_map": {"prefix": 4}}


def requests(number=12):
    return [
        (
            id_ // 3,
            Request(
                id=id_,
                prompt=tuple(range(id_ % 3, id_ % 3 + 3 + 5 * (id_ % 4))),
                sampling=Sampling(max_tokens=3 + 4 * (id_ % 4)),
                objective=OBJECTIVE,
            ),
        )
        for id_ in range(number)
    ]


def logged(fleet):
    """Return a list that gets the instance of each request that is placed."""
    routes, place = [], fleet._dispatcher.place

    def noted(request, view):
        if (route := place(request, view)) is not None:
            routes.append((view.now, request.id, route))
        return route

    fleet._dispatcher.place = noted
    return routes


@pytest.mark.parametrize("name", DISPATCH)
def test_a_fleet_makes_the_placements_moves_and_plans_of_the_simulator(name):
    config, given = DISPATCH[name](**FIELDS.get(name, {})), requests()
    rig = Rig(FACTS, config, 3)
    found = logged(rig.fleet)
    rig.serve([(float(time), request) for time, request in given])
    assert rig.streams.tokens == {request.id: answer(request, 40) for _, request in given}
    arrivals = [
        Arrival(request=one, time=float(time), answer=tuple(answer(one, 40))) for time, one in given
    ]
    simulation = Simulation(
        arrivals,
        FACTS,
        BATCHING["split_fuse"](),
        COST,
        num_instances=3,
        dispatch=config,
        keeps_plans=True,
    )
    expected = logged(simulation.fleet)
    simulation.run()
    assert found == expected and len(found) == len(given)
    assert rig.plans == simulation.plans
    assert rig.fleet.pages_copied == simulation.fleet.pages_copied
    assert (rig.fleet.num_moves > 0) == (name in ("llumnix", "dist_serve", "pd_serve"))


class LayersEngineConfig(EngineConfig):
    """An engine whose pieces may stop between layers, as the executor of the test computes them."""

    def instance(self, facts):
        plain = EngineConfig.instance(self, facts)
        return LayersInstance(plain.facts, plain.policy, has_sharing=plain.has_sharing)


@pytest.mark.parametrize("policy", ONE_LANE)
@pytest.mark.parametrize("retention", RETENTION)
@pytest.mark.rows(8)
def test_the_engine_makes_the_plans_of_the_simulator(policy, retention):
    """By a logical clock, which the executor advances: arrivals come while its steps run."""
    config = EVERY_BATCHING[policy](**({"patience": 0.0} if policy == "laps" else {}))
    given = [(time, one) for time, one in requests(8)]
    now, plans, streams = [0.0], [], []

    class Clocked(PageWorker):
        def run(self, step):
            now[0] += 1.0
            arrive()
            return PageWorker.run(self, step)

    def arrive():
        while given and given[0][0] <= now[0]:
            one = given.pop(0)[1]
            asked = {"objective": one.objective}
            streams.append(engine.submit(one.prompt, one.sampling, **asked))
        if not given:
            arrived.set()

    arrived, held = threading.Event(), threading.Event()
    kept, worker = RETENTION[retention](), Clocked(TIGHT)
    chosen = LayersEngineConfig(batching=config, retention=kept)
    engine = Engine(worker, chosen, clock=lambda: now[0])
    member = engine._members.all[0]
    plan = member.policy

    def noted(view):
        plans.append(plan(view))
        return plans[-1]

    member.policy = noted
    engine._inbox.put(held.wait)  # the first arrivals come together
    arrive()
    held.set()
    with engine:
        assert arrived.wait(60) and engine.drain(timeout=60)
    arrivals = [
        Arrival(request=one, time=float(time), answer=tuple(answer(one, 40)))
        for time, one in requests(8)
    ]
    facts = dataclasses.replace(TIGHT, max_waiting=256)
    simulation = Simulation(arrivals, facts, config, FREE_SWAPS, retention=kept, keeps_plans=True)
    simulation.run()
    assert [one for one in plans if one.num_tokens] == [one for _, one in simulation.plans]
    found = [tokens for tokens, _ in map(read, streams)]
    assert found == [answer(one, 40) for _, one in requests(8)]
    is_preempted = simulation.num_preempted > 0
    assert (worker.pages.num_swapped > 0) == (is_preempted and retention == "swap_groups")
    assert is_preempted or policy not in ("split_fuse", "prefill_first")


DISPATCHES = {
    "llumnix": DISPATCH["llumnix"](threshold=100.0),
    "dist_serve": DISPATCH["dist_serve"](),
    "pd_serve": DISPATCH["pd_serve"](),
    "least_loaded": DISPATCH["least_loaded"](),
}
SMALL = dataclasses.replace(FACTS, num_pages=30, cost=None)


def asked(number=10):
    return {
        id_: Request(
            id=id_,
            prompt=tuple(range(id_ % 4, id_ % 4 + 3 + id_)),
            sampling=Sampling(max_tokens=5 + id_),
        )
        for id_ in range(number)
    }


def read(stream):
    *tokens, ended = stream
    return [one.token for one in tokens], ended


def engine_of(dispatch, workers=None, steps_ahead=0):
    facts = dataclasses.replace(SMALL, steps_ahead=steps_ahead)
    workers = workers or [PageWorker(facts) for _ in range(2)]
    return FleetEngine(workers, fleet=FleetConfig(dispatch=DISPATCHES[dispatch]))


class Nowhere(RequestDispatcher):
    """Has no place for any request."""

    def place(self, request, fleet):
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NowhereConfig(DispatchConfig):
    """Offers all requests for ever."""

    name: ClassVar[str] = "nowhere"

    def build(self):
        return Nowhere()


def test_answers_of_one_request_are_offered_together_or_refused_together():
    workers = [PageWorker(SMALL) for _ in range(2)]
    fleet = FleetConfig(dispatch=NowhereConfig())
    with FleetEngine(workers, EngineConfig(max_waiting=2), fleet=fleet) as engine:
        first, second = (engine.submit_all([(1,), (2,), (3,)], Sampling()) for _ in range(2))
        engine.cancel_all()
        assert [read(stream)[1].reason for stream in first] == ["cancelled"] * 3
        assert [read(stream)[1].reason for stream in second] == ["refused"] * 3


@pytest.mark.parametrize(
    "dispatch", [name for name in DISPATCH if name not in ("pd_serve", "prfaas")]
)
def test_a_request_is_refused_only_where_no_queue_has_room(dispatch):
    """Also where a policy keeps a session, or a long prompt, at one instance."""
    facts = Facts(num_pages=14, page_size=4, max_running=1, max_length=40, max_waiting=2)
    instances = [Instance(facts) for _ in range(4)]
    policies = [BATCHING["split_fuse"]().build(facts) for _ in instances]
    fleet = Fleet(instances, policies, DISPATCH[dispatch]())
    places = 2 * sum(role != "decode" for role in fleet.roles)
    for id_ in range(places):
        prompt = tuple(range(1, 2 + 10 * (id_ == 0)))
        assert not fleet.submit(Request(id=id_, prompt=prompt, session="s"), 0.0)
    (end,) = fleet.submit(Request(id=places, prompt=(1, 2), session="s"), 0.0)
    assert end.reason == "refused" and end.code == "queue_full"
    fleet.check_pages()


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_an_engine_of_two_instances_answers_as_one_alone(dispatch, steps_ahead):
    given = asked()
    with engine_of(dispatch, steps_ahead=steps_ahead) as engine:
        streams = {id_: engine.submit(one.prompt, one.sampling) for id_, one in given.items()}
        late = engine.submit((1, 2, 3), Sampling(max_tokens=30))
        late.cancel()
        found = {id_: read(stream) for id_, stream in streams.items()}
        assert read(late)[1].reason in ("cancelled", "length")
        assert engine.drain(timeout=60)
        engine._members.fleet.check_pages()
        assert not engine._members.fleet._moves
        each, metrics = engine.instance_metrics, engine.metrics
    assert {id_: tokens for id_, (tokens, _) in found.items()} == {
        id_: answer(one, 40) for id_, one in given.items()
    }
    assert metrics.num_submitted == sum(metrics.num_ended.values()) == len(given) + 1
    assert metrics.num_submitted == sum(one.num_submitted for one in each)  # moves count once
    assert metrics.pages_used == 0 and metrics.pages_total == 60 == 2 * each[0].pages_total
    assert metrics.pages_moved == sum(one.pages_moved for one in each)
    assert (metrics.pages_moved > 0) or dispatch != "dist_serve"
    if dispatch == "dist_serve":
        assert each[0].num_moved >= len(given) and each[1].num_moved == 0
        assert (each[0].num_submitted, each[1].num_submitted) == (len(given) + 1, 0)
        assert each[0].num_ended.get("length", 0) <= 1


@pytest.mark.parametrize("method", ["read_pages", "write_pages"])
def test_a_copy_that_fails_ends_no_stream_of_the_source(method):
    class Failing(PageWorker):
        """Does not copy pages."""

    def fail(self, *given):
        raise RuntimeError("link lost")

    setattr(Failing, method, fail)
    given = asked(4)
    with engine_of("dist_serve", [Failing(SMALL) for _ in range(2)]) as engine:
        streams = {id_: engine.submit(one.prompt, one.sampling) for id_, one in given.items()}
        found = {id_: read(stream) for id_, stream in streams.items()}
        assert engine.drain(timeout=60)
        engine._members.fleet.check_pages()
        assert engine.instance_metrics[0].num_ended == {"length": 4}
    assert {id_: tokens for id_, (tokens, _) in found.items()} == {
        id_: answer(one, 40) for id_, one in given.items()
    }


def test_a_step_that_fails_ends_the_streams_of_its_instance_alone():
    class Failing(PageWorker):
        """Fails in its third step."""

        steps = 0

        def run(self, step):
            self.steps += 1
            if self.steps == 3:
                raise RuntimeError("device lost")
            return PageWorker.run(self, step)

    given = asked(6)
    with engine_of("least_loaded", [Failing(SMALL), PageWorker(SMALL)]) as engine:
        streams = {id_: engine.submit(one.prompt, one.sampling) for id_, one in given.items()}
        found = {id_: read(stream) for id_, stream in streams.items()}
        lost, kept = engine.instance_metrics
        assert lost.num_ended.get("error", 0) > 0 and set(kept.num_ended) == {"length"}
        tokens, ended = read(engine.submit((1, 2), Sampling(max_tokens=4)))
        assert ended.reason == "length"
    for id_, (tokens, ended) in found.items():
        assert ended.reason == "error" or tokens == answer(given[id_], 40)


def test_a_policy_that_moves_refuses_an_executor_that_cannot():
    class Fixed:
        """An executor without pages that travel."""

        def __init__(self):
            worker = PageWorker(SMALL)
            self.facts, self.check, self.run = worker.facts, worker.check, worker.run
            self.reset, self.expert_load = worker.reset, worker.expert_load

    with pytest.raises(ValueError, match="dispatch='llumnix' needs pages that travel"):
        engine_of("llumnix", [Fixed(), Fixed()])
    with engine_of("least_loaded", [Fixed(), Fixed()]) as engine:
        assert read(engine.submit((1, 2), Sampling(max_tokens=2)))[1].reason == "length"


def test_exchanges_keep_the_pages_or_change_nothing():
    class Adopting(PageWorker):
        """Takes over what the present executor holds, or refuses."""

        refuses = False

        def adopt(self, other):
            if self.refuses:
                raise ValueError("sizes differ")
            self.pages.memory |= other.pages.memory
            return "adopted"

    request = Request(id=0, prompt=(1, 2, 3), sampling=Sampling(max_tokens=30))
    wrong = Adopting(SMALL)
    wrong.refuses = True
    with engine_of("least_loaded") as engine:
        stream = engine.submit(request.prompt, request.sampling)
        for _ in range(3):
            assert engine.exchange(Adopting(SMALL)).result(60) == "adopted"
            with pytest.raises(ValueError, match="sizes differ"):
                engine.exchange(wrong).result(60)
        assert read(stream)[0] == answer(request, 40)
    assert engine.exchange(Adopting(SMALL)).cancelled()
