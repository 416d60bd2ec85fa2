# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What a step and a placement look at does not grow with the queue."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from jaxmoe.contrib.fleet.dispatch import DISPATCH
from jaxmoe.contrib.fleet.fleet import Fleet
from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.shares import LanesInstance
from jaxmoe.serve import Request, Sampling
from jaxmoe.serve.queues import WaitingQueue
from jaxmoe.serve.sequence import Sequence
from tests.support.simulated import COST, FACTS

LOOKS = ("id", "tokens", "computed", "state", "request")
SCANS = {"flow_prefill"}
"""Orders all prompts anew by their slack whenever one comes or goes."""
WAITS = {"dual_map", "prfaas"}
"""Predict the time of everything that waits."""


@contextlib.contextmanager
def looks(monkeypatch):
    """Count what is read of all sequences, and those that are taken from a queue."""
    seen = []
    read_queue = WaitingQueue.__iter__

    def iterate(queue):
        for sequence in read_queue(queue):
            seen.append("queue")
            yield sequence

    def counted(name):
        slot = getattr(Sequence, name)

        def read(sequence):
            seen.append(name)
            return slot.__get__(sequence)

        return property(read, slot.__set__)

    with monkeypatch.context() as patch:
        for name in LOOKS:
            patch.setattr(Sequence, name, counted(name))
        patch.setattr(WaitingQueue, "__iter__", iterate)
        yield seen


def request(number):
    length = 20 if number % 2 else 60  # both lengths of a policy that tells two apart
    prompt = tuple(range(number, number + length))
    return Request(id=number, prompt=prompt, sampling=Sampling(max_tokens=40))


def steps(fleet, numbers):
    for now in numbers:
        for _ in range(2):  # both lanes
            _, started = fleet.start(0, float(now))
            for step in started:
                results = {work.id: 7 for work in step.works if work.draws}
                fleet.apply(0, step, results, float(now))
        fleet.balance(float(now))


def crowded(batching, num_waiting, dispatch="least_loaded", number=1):
    lanes = 2 if "partitions" in EVERY_BATCHING[batching].needs else 1
    sizes = {"num_pages": 64, "max_running": 8, "max_length": 512, "steps_at_once": lanes}
    facts = dataclasses.replace(FACTS, **sizes)
    fields = {"border": 32, "budget": 64} if batching == "laps" else {}
    policies = [EVERY_BATCHING[batching](**fields).build(facts) for _ in range(number)]
    instances = [LanesInstance(facts, batching, has_tokens=False) for _ in range(number)]
    fleet = Fleet(instances, policies, DISPATCH[dispatch]())
    for id_ in range(num_waiting):
        instances[0].submit(request(id_), 0.0)
    steps(fleet, range(12))
    assert len(instances[0].queues.waiting) > 0.8 * num_waiting
    return fleet


@pytest.mark.parametrize("batching", sorted(set(EVERY_BATCHING) - SCANS))
def test_a_step_looks_at_as_much_behind_a_long_queue(batching, monkeypatch):
    counts = []
    for num_waiting in (100, 1000):
        fleet = crowded(batching, num_waiting)
        with looks(monkeypatch) as seen:
            steps(fleet, range(12, 16))
        counts.append(len(seen))
    assert 0 < counts[1] <= 1.1 * counts[0]


@pytest.mark.parametrize("dispatch", sorted(set(DISPATCH) - WAITS))
def test_a_placement_looks_at_as_much_of_a_long_queue(dispatch, monkeypatch):
    counts = []
    for num_waiting in (100, 1000):
        fleet = crowded("split_fuse", num_waiting, dispatch, number=2)
        with looks(monkeypatch) as seen:
            fleet.submit(request(10_000), 20.0)
        counts.append(len(seen))
    assert counts[1] <= 1.1 * counts[0] + 10  # a search by halves looks at a few more


def test_requests_that_have_no_place_are_asked_for_one_at_a_time():
    facts = dataclasses.replace(FACTS, cost=COST, num_pages=64, max_length=512)
    asked = []
    for number in (100, 1000):
        instances = [LanesInstance(facts) for _ in range(2)]
        policies = [EVERY_BATCHING["split_fuse"]().build(facts) for _ in instances]
        fleet = Fleet(instances, policies, DISPATCH["pd_serve"]())
        for id_ in range(number):
            fleet.submit(request(id_), 0.0)
        assert len(fleet.offered) == number - 1
        place, calls = fleet._dispatcher.place, []
        fleet._dispatcher.place = lambda *given, p=place, c=calls: c.append(1) or p(*given)
        fleet.balance(1.0)
        asked.append(len(calls))
    assert asked == [1, 1]
