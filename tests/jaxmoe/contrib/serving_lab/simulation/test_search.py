# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Searches of the simulator, beside all possibilities."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.serving_lab.simulation.search import largest_rate, pareto_cuts, place_phases


def test_the_largest_rate_is_found_by_bisection():
    def within(rate):
        return 1.0 if rate <= 3.3 else 0.5

    assert 3.3 / 1.02 <= largest_rate(within, 0.5, 16.0) <= 3.3
    assert largest_rate(within, 4.0, 16.0) == 0.0
    assert largest_rate(within, 0.5, 3.0) == 3.0


@settings(max_examples=20, deadline=None)
@given(prompts=st.floats(0.5, 9.0), answers=st.floats(0.5, 9.0))
def test_the_division_into_phases_is_that_of_brute_force(prompts, answers):
    """One instance serves so many prompts, or so many answers, per second."""

    def capacity(prefill, decode):
        return min(prefill * prompts, decode * answers)

    def within(prefill, decode, rate):
        return min(1.0, 0.9 * capacity(prefill, decode) / rate)

    best = max(
        capacity(prefill, total - prefill) / total
        for total in range(2, 7)
        for prefill in range(1, total)
    )
    found = place_phases(within, 6, low=0.01, high=10.0, tolerance=0.001)
    assert found is not None
    assert found.per_instance == pytest.approx(best, rel=0.003)
    assert found.rate <= capacity(found.prefill, found.decode)


def test_no_division_is_named_where_no_rate_is_served():
    assert place_phases(lambda prefill, decode, rate: 0.0, 4, low=1.0, high=2.0) is None


def brute_force(layers, transfers, speeds):
    cuts = []
    for number in range(min(len(layers), len(speeds))):
        for borders in itertools.combinations(range(1, len(layers)), number):
            ends = itertools.pairwise((0, *borders, len(layers)))
            stages = [sum(layers[a:b]) / s for (a, b), s in zip(ends, speeds, strict=False)]
            sent = [transfers[border - 1] for border in borders]
            cuts.append((sum(stages) + sum(sent), max([*stages, *sent])))
    return {
        (x, y) for x, y in cuts if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in cuts)
    }


@settings(max_examples=40, deadline=None)
@given(
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    transfer=st.integers(0, 3),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
)
def test_cuts_into_stages_are_those_that_no_cut_of_all_dominates(layers, transfer, speeds):
    transfers = [float((transfer * i) % 4) for i in range(len(layers) - 1)]
    found = pareto_cuts([float(layer) for layer in layers], transfers, speeds=speeds)
    assert {(cut.latency, cut.interval) for cut in found} == brute_force(layers, transfers, speeds)
    for cut in found:
        assert list(cut.borders) == sorted(set(cut.borders)) and len(cut.borders) < len(speeds)


def test_equal_layers_are_cut_evenly():
    found = pareto_cuts([0.1] * 8, [0.0] * 7, speeds=[1.0] * 4)
    (cut,) = found
    assert cut.borders == (2, 4, 6)
    assert (cut.latency, cut.interval) == (pytest.approx(0.8), pytest.approx(0.2))


def test_numbers_that_do_not_fit_the_chain_are_refused():
    with pytest.raises(ValueError, match="3 transfers and 1 speeds"):
        pareto_cuts([1.0, 1.0], [0.0] * 3, speeds=[1.0])
