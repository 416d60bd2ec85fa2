# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Requests, sampling and compiled shapes."""

from __future__ import annotations

import pytest

from jaxmoe.serve import LatencyObjective, Request, Sampling, Shapes


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("max_tokens", 0, "at least 1"),
        ("temperature", -0.1, "0 .greedy. or above"),
        ("temperature", float("nan"), "0 .greedy. or above"),
        ("top_k", -1, "0 .all tokens. or more"),
        ("top_p", 0.0, r"lie in \(0, 1\]"),
        ("top_p", 1.1, r"lie in \(0, 1\]"),
        ("min_p", 1.5, r"lie in \[0, 1\]"),
        ("num_logprobs", -1, "0 or more"),
    ],
)
def test_values_that_cannot_be_sampled_with_are_refused(field, value, rule):
    with pytest.raises(ValueError, match=f"{field}={value} must (be )?{rule}"):
        Sampling(**{field: value})


def test_a_request_has_a_prompt():
    with pytest.raises(ValueError, match="prompt of request 3 is empty"):
        Request(id=3, prompt=())


def test_a_salt_that_cannot_name_pages_is_refused():
    with pytest.raises(ValueError, match="salt='.ud83d' must be text"):
        Request(id=0, prompt=(1,), salt="\ud83d")


@pytest.mark.parametrize(
    ("limit", "is_met"),
    [({}, True), ({"ttft": 0.5}, False), ({"tpot": 0.05}, False), ({"deadline": 2.9}, False)],
)
def test_an_objective_is_met_if_every_limit_is_kept(limit, is_met):
    assert LatencyObjective(**limit).is_met(1.0, 0.1, 3.0) == is_met


SHAPES = Shapes(singles=8, pieces=((1, 256), (4, 64), (2, 64)))


@pytest.mark.parametrize(
    ("counts", "shape"),
    [
        ([], (0, 0)),
        ([64], (2, 64)),
        ([65], (1, 256)),
        ([1, 1], (2, 64)),
        ([1, 1, 64], (4, 64)),
        ([65, 1], None),
        ([1] * 5, None),
        ([257], None),
    ],
)
def test_pieces_take_the_smallest_shape_that_holds_them(counts, shape):
    assert SHAPES.fitting(counts) == shape


@pytest.mark.parametrize(
    ("counts", "room"), [([], 256), ([64], 64), ([65], 0), ([3, 4, 5], 64), ([1] * 4, 0)]
)
def test_room_is_what_one_more_piece_may_have(counts, room):
    assert SHAPES.room(counts) == room
    if room:
        assert SHAPES.fitting([*counts, room]) is not None
    assert SHAPES.fitting([*counts, room + 1]) is None
