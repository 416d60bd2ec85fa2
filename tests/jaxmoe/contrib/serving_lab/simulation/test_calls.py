# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated token takes few calls of functions, and no more of them among many requests."""

from __future__ import annotations

import dataclasses
import sys

from jaxmoe.contrib.serving_lab.batching import EVERY_BATCHING
from jaxmoe.contrib.serving_lab.simulation import Simulation
from tests.support.simulated import COST, FACTS, arrivals


def _calls(requests):
    """Return the calls of Python functions in a simulation, and the tokens of its answers."""
    given = arrivals(requests=requests, rate=200.0, answer_median=60.0)
    facts = dataclasses.replace(FACTS, num_pages=4000)
    simulation = Simulation(given, facts, EVERY_BATCHING["split_fuse"](), COST)
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation.run()
    finally:
        sys.setprofile(before)
    return number, simulation.answers.num_written


def test_a_simulated_token_takes_few_calls():
    few, some = _calls(20)
    many, more = _calls(40)
    assert more > 1.4 * some
    assert many / more < few / some  # a step is shared by more sequences
    assert (many - few) / (more - some) < 20
    assert many / more < 32
