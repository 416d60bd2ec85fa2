# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Histograms of the times of answers, of one engine and of several together."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.serve.metrics import BOUNDS, EngineMetrics, Times, total

seconds = st.lists(st.one_of(st.floats(0.0, 400.0), st.sampled_from(BOUNDS)), max_size=20)


def histogram(values):
    found = Times()
    for value in values:
        found = found.with_time(value)
    return found


@settings(max_examples=50, deadline=None)
@given(one=seconds, other=seconds)
def test_a_histogram_counts_the_times_up_to_each_bound_and_instances_add_up(one, other):
    both = total([EngineMetrics(times_ttft=histogram(v)) for v in (one, other)]).times_ttft
    reached = [*itertools.accumulate(both.counts)]
    values = np.array([*one, *other])
    assert reached == [int((values <= bound).sum()) for bound in (*BOUNDS, np.inf)]
    np.testing.assert_allclose(both.seconds, values.sum())
