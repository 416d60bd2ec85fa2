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
    """Return the calls of functions of the library in a simulation, and the tokens written."""
    given = arrivals(requests=requests, rate=200.0, answer_median=60.0)
    facts = dataclasses.replace(FACTS, num_pages=4000)
    simulation = Simulation(given, facts, EVERY_BATCHING["split_fuse"](), COST)
    number = 0

    def count(frame, event, argument):
        nonlocal number
        number += event == "call" and "/jaxmoe/" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        simulation.run()
    finally:
        sys.setprofile(before)
    return number, simulation.answers.num_written


def test_a_simulated_token_takes_few_calls():
    _calls(1)  # imports what is loaded when it is first used
    few, some = _calls(20)
    many, more = _calls(40)
    assert more > 1.4 * some
    assert many / more < few / some  # a step is shared by more sequences
    assert (many - few) / (more - some) < 18  # of one token more; before: 23.3, now 15.5
    assert many / more < 29  # with its part of a step; before: 33.5, now 26.1
