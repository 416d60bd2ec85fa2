# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Each scaling policy has its defining property; no request is lost when instances come and go."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest

from jaxmoe.contrib.fleet.dispatch import DISPATCH
from jaxmoe.contrib.fleet.scaling import SCALING, PolcaConfig
from jaxmoe.contrib.fleet.scaling.base import ScalingView, answer_lengths, rate_within
from jaxmoe.contrib.fleet.scaling.slo import SLOConfig
from jaxmoe.contrib.serving_lab.simulation import Simulation, measure
from jaxmoe.contrib.serving_lab.simulation.answers import latency
from jaxmoe.serve import BATCHING, Instance, LatencyObjective, Request, Sampling
from jaxmoe.serve.facts import WorkPart
from jaxmoe.serve.sequence import Sequence
from tests.support.simulated import COST, FACTS, arrivals

QUICK = {"slo": {"interval": 0.05}, "elastic_experts": {"interval": 0.05}}
QUICK["polca"] = {"interval": 0.02, "budget": 0.4}
FREQUENT = {"slo": {"interval": 0.02}}
QUICKLY_READ = dataclasses.replace(COST, chip=dataclasses.replace(COST.chip, host_bandwidth=1e12))
"""Costs of which the weights are read quickly."""


def scaled(
    name, given, number=3, often=None, *, cost=QUICKLY_READ, dispatch="least_loaded", **fields
):
    facts = dataclasses.replace(FACTS, cost=cost)
    config = SCALING[name](**{**(often or QUICK.get(name, {})), **fields})
    return Simulation(
        given,
        facts,
        BATCHING["split_fuse"](),
        cost,
        num_instances=number,
        dispatch=DISPATCH[dispatch](),
        scaling=config,
        keeps_sequences=True,
    ).run()


TIGHT = LatencyObjective(ttft=0.02, tpot=0.004)


def crowd(objective=TIGHT, **fields):
    given = {"rate": 300.0, "requests": 60, "answer_median": 20.0, **fields}
    return arrivals(objective=objective, **given)


@pytest.mark.parametrize("dispatch", ["least_loaded", "round_robin", "dual_map", "llumnix", "saga"])
@pytest.mark.parametrize("name", SCALING)
@pytest.mark.rows(1)
def test_joining_and_draining_lose_no_request(name, dispatch):
    busy, late = crowd(requests=40), crowd(requests=8, rate=30.0)
    begin = busy[-1].time + 0.3
    given = [*busy]
    for one in late:
        request = dataclasses.replace(one.request, id=one.request.id + 40)
        given.append(dataclasses.replace(one, request=request, time=begin + one.time))
    simulation = scaled(name, given, 3, FREQUENT.get(name), dispatch=dispatch)
    assert set(simulation.sequences) == set(range(48))
    for one in given:
        written = simulation.sequences[one.request.id].tokens
        assert tuple(written) == one.request.prompt + one.answer
    simulation.fleet.check_pages()
    opened = [number for _, number, _ in simulation.scaling.changes]
    if name == "slo":
        assert max(opened) > 1 == opened[-1]  # they have joined and drained
    else:
        assert set(opened) <= {3}


def test_slo_without_limits_keeps_one_instance():
    simulation = scaled("slo", crowd(LatencyObjective()))
    assert not simulation.scaling.changes and simulation.busy_seconds[1:] == [0.0, 0.0]
    assert rate_within(COST, FACTS, [one.request for one in crowd(LatencyObjective())]) == math.inf


def test_an_instance_that_drains_ends_what_it_has_and_takes_nothing_more():
    given = crowd(requests=40, answer_median=100.0)
    simulation = Simulation(
        given, FACTS, BATCHING["split_fuse"](), COST, num_instances=2, keeps_sequences=True
    )
    left, submit = {}, simulation.fleet.submit

    def noted(request, now):
        if request.id == 20:
            simulation.fleet.num_open = 1
            left.update(dict.fromkeys(simulation.fleet.instances[1].queues.sequences))
        return submit(request, now)

    simulation.fleet.submit = noted
    simulation.run()
    drained = simulation.fleet.instances[1].queues
    assert left and drained.submitted <= 20 and drained.ended["length"] == drained.submitted
    assert set(simulation.sequences) == set(range(40))
    assert simulation.scaling._is_on == [True, False]


def test_the_rate_within_an_objective_grows_with_it_and_with_devices():
    requests = {t: [one.request for one in crowd(LatencyObjective(tpot=t))] for t in (0.003, 0.01)}
    tight, loose = (rate_within(COST, FACTS, one) for one in requests.values())
    assert 0 < tight < loose < math.inf
    assert rate_within(COST.on_chips(4), FACTS, requests[0.003]) > tight


def test_the_length_of_answers_is_that_of_those_that_have_ended():
    """Conversations without a limit allow all that a prompt leaves, and write little of it."""
    objective = LatencyObjective(tpot=0.01)
    bounded = [one.request for one in crowd(objective)]
    endless = [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, max_tokens=4000))
        for one in bounded
    ]
    lengths = [one.sampling.max_tokens for one in bounded]
    rate = rate_within(COST, FACTS, bounded)
    assert rate_within(COST, FACTS, endless) < rate / 3
    mean = [round(sum(lengths) / len(lengths))]
    assert rate_within(COST, FACTS, endless, lengths=mean) == pytest.approx(rate, rel=0.1)
    assert rate_within(COST, FACTS, bounded, lengths=[10**6]) == rate


def test_lengths_are_known_where_as_many_have_ended_as_run():
    """The first to end are the short ones. Embeddings have no answer."""

    def sequence(number):
        """Return one with 5 tokens behind its prompt, every other one without an answer."""
        sampling = Sampling(max_tokens=1, has_answer=not number % 2)
        request = Request(id=number, prompt=(1,), sampling=sampling)
        return Sequence(request=request, order=0, arrived=0.0, page_size=4, tokens=(1,) * 6)

    def view(num_ended, num_running):
        return dataclasses.replace(
            Instance(FACTS).view(0.0),
            finished=tuple(map(sequence, range(num_ended))),
            running=tuple(map(sequence, range(num_running))),
        )

    assert answer_lengths(view(2, 3)) == []
    assert answer_lengths(view(4, 3)) == [5, 5]
    assert len(answer_lengths(view(100, 256))) == 50
    assert answer_lengths(view(0, 0)) == []


def test_an_instance_joins_when_its_weights_are_read_and_takes_power_until_then():
    simulation = scaled("slo", crowd(), cost=COST)
    time, number, _ = simulation.scaling.changes[0]
    assert number == 2
    decided = time - COST.loading_seconds()
    assert decided / 0.05 == pytest.approx(round(decided / 0.05))


@pytest.mark.parametrize("name", ["fixed", "slo"])
def test_more_instances_never_lower_goodput(name):
    given = crowd()
    found = [measure(scaled(name, given, number)).goodput for number in (1, 2, 3)]
    assert found == sorted(found) and found[0] < found[-1]


def test_elastic_experts_take_twice_the_devices_and_the_time_of_their_bytes():
    simulation = scaled("elastic_experts", crowd(rate=900.0), 1, cost=COST)
    time, _, chips = simulation.scaling.changes[0]
    assert chips == 2
    decided = time - COST.resharding_seconds(2)
    assert decided / 0.05 == pytest.approx(round(decided / 0.05))
    assert all(
        max(a, b) == 2 * min(a, b)
        for (_, _, a), (_, _, b) in zip(
            simulation.scaling.changes[:-1], simulation.scaling.changes[1:], strict=True
        )
    )


@pytest.mark.parametrize(("few", "many"), [(1, 2), (2, 4), (2, 8), (4, 4)])
def test_the_time_of_resharding_is_bytes_over_bandwidth(few, many):
    """Device by device: each holds an equal share, and keeps what it will hold again."""
    small, large = COST.on_chips(few), COST.on_chips(many)
    share = COST.weight_bytes / many
    received = share if many > few else 0.0
    sent = COST.weight_bytes / few - share
    busiest = max(received, sent)
    bandwidth = COST.chip.link_bandwidth
    assert small.resharding_seconds(many) == pytest.approx(busiest / bandwidth)
    assert large.resharding_seconds(few) == pytest.approx(small.resharding_seconds(many))


def test_polca_power_is_above_its_budget_in_one_control_interval_at_most():
    given = arrivals(rate=500.0, requests=60, prompt_median=900.0)
    simulation = scaled("polca", given, 2, interval=0.05, budget=0.5)
    peak = 2 * COST.chip.peak_watts
    above = [watts > 0.5 * peak for watts in simulation.scaling.powers]
    assert any(above)
    assert not any(a and b for a, b in zip(above[:-1], above[1:], strict=True))
    free = scaled("fixed", given, 2)
    assert simulation.now > free.now and len(simulation.sequences) == 60


def test_polca_caps_by_thresholds_and_releases_with_hysteresis():
    following = PolcaConfig().following
    assert [following(0, used) for used in (0.5, 0.79, 0.85, 0.95, 1.01)] == [0, 0, 1, 2, 3]
    assert [following(1, used) for used in (0.76, 0.74)] == [1, 0]
    assert [following(2, used) for used in (0.85, 0.83)] == [2, 1]
    assert [following(3, used) for used in (1.2, 0.99, 0.2)] == [3, 2, 2]


def test_polca_spares_requests_of_high_priority():
    given = [
        dataclasses.replace(one, request=dataclasses.replace(one.request, priority=id_ % 2))
        for id_, one in enumerate(arrivals(rate=500.0, requests=40, prompt_median=900.0))
    ]
    slower = []
    capped = scaled("polca", given, 2, dispatch="round_robin", interval=0.05, budget=0.9)
    free = scaled("fixed", given, 2, dispatch="round_robin")
    for parity in (0, 1):  # the requests of one instance
        times = [
            sum(latency(one)[2] for id_, one in found.sequences.items() if id_ % 2 == parity)
            for found in (capped, free)
        ]
        slower.append(times[0] / times[1])
    assert slower[0] > slower[1] > 1


def test_power_follows_the_clock_and_the_load():
    prompt, token = [WorkPart(4000)], [WorkPart(1, 100)]
    dynamic = COST.chip.peak_watts - COST.chip.idle_watts
    full, half = COST.cost(prompt), COST.at_clock(0.5).cost(prompt)
    assert 0 < COST.cost(token).watts < full.watts <= dynamic
    assert half.seconds > 1.5 * full.seconds
    assert half.watts <= full.watts / 7  # f^3, and what waits for memory counts less
    assert COST.at_clock(0.5).cost(token).seconds == pytest.approx(
        COST.cost(token).seconds, rel=0.1
    )
    assert COST.on_chips(4).idle_watts == 4 * COST.chip.idle_watts


def test_energy_is_that_of_idling_and_of_every_step():
    given = arrivals(requests=1)
    simulation = scaled("fixed", given, 2)
    whole = simulation.meter.joules
    idle = 2 * COST.idle_watts * simulation.now
    assert idle < whole < idle + COST.chip.peak_watts * simulation.busy_seconds[0] + 1e-6
    assert measure(simulation).joules_per_token == pytest.approx(whole / len(given[0].answer))


def test_instances_with_roles_cannot_join():
    with pytest.raises(ValueError, match="scaling='slo' lets instances join and drain"):
        scaled("slo", [], dispatch="dist_serve")


@pytest.mark.parametrize(
    ("rates", "present", "instances"),
    [
        ((5.0,), 3, 2),
        ((15.0, 15.0), 2, 2),
        ((20.0, 20.0), 1, 2),
        ((5.0, 10.0), 1, 2),
        ((10.0, 5.0), 1, 1),
        ((90.0, 90.0), 4, 4),
    ],
)
def test_slo_follows_the_predicted_rate_by_one_instance(rates, present, instances, monkeypatch):
    """An instance serves 10 requests a second; there are at most 4."""
    monkeypatch.setattr(SLOConfig, "rate", lambda self, hardware, view: 10.0)
    decide = SLOConfig().build()
    for rate in rates:
        # Annotations are those of views of a fleet, of which the policy reads a few fields.
        view = object.__new__(ScalingView)
        fields = {"arrived": (None,) * int(rate), "seconds": 1.0, "num_instances": 4}
        fields["fleet"] = types.SimpleNamespace(members=range(present))
        fields["hardware"] = types.SimpleNamespace(loading_seconds=lambda: 0.5)
        for name, value in fields.items():
            object.__setattr__(view, name, value)
        wanted = decide(view)
    assert wanted.instances == instances
    assert wanted.delay == 0.5 * (instances > present)
