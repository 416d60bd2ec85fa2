# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests that are read when they come, and forgotten when they have ended."""

from __future__ import annotations

import dataclasses
import weakref

import pytest

from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.simulation import WORKLOADS, Simulation, measure
from jaxmoe.contrib.serving_lab.simulation.measures import measure_sequences
from tests.support.simulated import COST, FACTS, OBJECTIVE, arrivals

CONFIG = EVERY_BATCHING["split_fuse"]()
SMALL = {"prompt_median": 120.0, "answer_median": 6.0}
OF_ANSWERS = ("goodput", "within", "finished", "seconds", "ttft_p99", "tpot_p50", "total_p50")


@pytest.mark.parametrize("name", ["gamma", "sessions"])
def test_a_stream_is_served_as_the_same_requests_at_once(name):
    workload = WORKLOADS[name](rate=60.0, requests=40, **SMALL)
    options = {"keeps_plans": True, "keeps_sequences": True, "num_instances": 2}
    at_once, stream = (
        Simulation(requests, FACTS, CONFIG, COST, **options).run()
        for requests in (workload.arrivals(OBJECTIVE, 4096), workload.stream(OBJECTIVE, 4096))
    )
    assert stream.plans == at_once.plans and measure(stream) == measure(at_once)
    assert set(stream.sequences) == set(at_once.sequences) == set(range(40))
    for id_, sequence in at_once.sequences.items():
        assert [*stream.sequences[id_].tokens] == sequence.tokens
    found, expected = measure(stream), measure_sequences(at_once.sequences.values())
    for field in OF_ANSWERS:
        assert getattr(found, field) == getattr(expected, field)


def _most_alive(number):
    """Return the prompts of a stream that are in memory at a time at most."""
    workload = WORKLOADS["gamma"](rate=2.0, requests=number, shape=4.0, **SMALL)
    references, ended, counts = [], [], []

    def stream():
        for arrival in workload.stream(OBJECTIVE, 4096):
            references.append(weakref.ref(arrival.request.prompt, ended.append))
            counts.append(len(references) - len(ended))
            yield arrival

    simulation = Simulation(stream(), FACTS, CONFIG, COST).run()
    assert len(simulation.answers) == number and not simulation.sequences
    return max(counts)


def test_requests_that_have_ended_or_not_come_take_no_memory():
    few, many = _most_alive(150), _most_alive(450)
    assert many <= few + 5 <= 115  # an instance remembers a hundred that ended lately


def test_a_stream_out_of_order_is_refused_in_words():
    first, second = arrivals(requests=2)
    later = dataclasses.replace(second, after=7)
    for requests, message in (
        ([second, first], "request 0 of the stream comes at .* in the order of time"),
        ([first, first], "request 0 is there twice"),
        ([first, later], "after request 7, which is not there or has ended"),
    ):
        with pytest.raises(ValueError, match=message):
            Simulation(iter(requests), FACTS, CONFIG, COST).run()
