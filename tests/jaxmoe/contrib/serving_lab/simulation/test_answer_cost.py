# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Cost of several answers beside values computed by hand; thresholds for drafts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.contrib.serving_lab.simulation.test_time import (
    AnswerCost,
    conformal_threshold,
    num_pairs,
    round_seconds,
)
from tests.support.simulated import SIZES

# P = 1000, N H = 10, M H = 2, I = 562.5
COST = AnswerCost(parameters=1000, pair_flops=40.0, kv_bytes=8.0)


BY_HAND = (
    # n (2 P G + 2 (2 C + G) G N H) and I 2 (2 C + n G) G M H
    (1, 0, 1, None, 2_020, 2_250),
    (1, 10, 1, None, 2_420, 47_250),
    (1, 100, 10, None, 62_000, 4_725_000),
    (4, 100, 10, None, 248_000, 5_400_000),
    (2, 50, 20, None, 176_000, 6_300_000),
    (8, 0, 10, None, 176_000, 1_800_000),
    # b G - max(0, b - C)^2 / 2 pairs
    (1, 100, 10, 20, 28_000, 900_000),
    (4, 100, 10, 20, 112_000, 3_600_000),
    (1, 10, 20, 20, 54_000, 1_575_000),
    (2, 10, 20, 20, 108_000, 2_700_000),  # no more than is read of all keys
    (1, 0, 10, 4, 21_280, 144_000),
    (4, 100, 10, 200, 248_000, 5_400_000),  # more keys than there are
)
"""Answers, prompt, length, budget; FLOPs and bytes as FLOPs."""


def test_costs_are_those_computed_by_hand():
    for answers, prompt, length, budget, flops, as_flops in BY_HAND:
        case = (answers, prompt, length, budget)
        assert COST.flops(*case) == pytest.approx(flops), case
        assert COST.bytes_as_flops(*case) == pytest.approx(as_flops), case
        assert COST.total(*case) == pytest.approx(flops + as_flops), case


@settings(max_examples=30, deadline=None)
@given(prompt=st.integers(0, 40), length=st.integers(1, 40), budget=st.integers(1, 90))
def test_pairs_within_a_budget_are_the_integral_over_the_answer(prompt, length, budget):
    t = (np.arange(4000) + 0.5) / 4000 * length
    integral = np.minimum(budget, prompt + t).mean() * length
    assert num_pairs(prompt, length, budget) == pytest.approx(integral, rel=1e-5)
    assert num_pairs(prompt, length, prompt + length) == num_pairs(prompt, length)


def test_the_cost_of_a_model_counts_active_parameters():
    found = AnswerCost.of(SIZES)
    assert found.parameters == SIZES.dense + SIZES.head + 12 * 4 * SIZES.expert
    assert (found.pair_flops, found.kv_bytes) == (SIZES.pair_flops, SIZES.kv_bytes)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.3])
def test_good_drafts_are_rejected_at_most_as_often_as_allowed(alpha):
    """Pairs of calibration and one new score; 4.5 standard deviations of the binomial."""
    rng, trials, number = np.random.default_rng(0), 4000, 39
    scores = rng.gumbel(size=(trials, number + 1))
    rejected = sum(row[-1] < conformal_threshold(row[:-1].tolist(), alpha) for row in scores)
    deviation = math.sqrt(trials * alpha * (1 - alpha))
    expected = trials * math.floor(alpha * (number + 1)) / (number + 1)
    assert rejected <= alpha * trials + 4.5 * deviation
    assert rejected >= expected - 4.5 * deviation


def test_too_few_scores_reject_nothing():
    assert conformal_threshold([1.0, 2.0], 0.1) == -math.inf
    assert conformal_threshold([3.0, 1.0, 2.0], 0.25) == 1.0
    with pytest.raises(ValueError, match=r"alpha=1\.0"):
        conformal_threshold([1.0], 1.0)


def test_answers_that_do_not_wait_are_never_later():
    drafts = np.array([[1.0, 4.0], [3.0, 1.0]])
    assert round_seconds(drafts, 0.5) == (8.0, 6.0)
    alike = np.ones((3, 4))
    assert round_seconds(alike, 0.5) == (4.5, 4.5)
