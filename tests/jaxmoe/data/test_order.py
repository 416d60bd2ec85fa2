# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Orders with random access: permutations for every size, and exact proportions."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxmoe.data import DataError
from jaxmoe.data.order import (
    interleave,
    interleaved_counts,
    interleaved_length,
    order_digest,
    shuffle_place,
    whole_weights,
)

GOLDEN = [5, 3, 6, 7, 4, 2, 1, 0]


def _epoch(size, seed, epoch=0):
    numbers = range(epoch * size, (epoch + 1) * size)
    places = [shuffle_place(number, size=size, seed=seed) for number in numbers]
    assert {place[0] for place in places} == {epoch}
    return [row for _, row in places]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 19, 255, 256, 257, 1000])
def test_shuffle_visits_every_row_once_per_epoch(size):
    for epoch in (0, 1, 7):
        assert sorted(_epoch(size, 3, epoch)) == list(range(size))


def test_shuffle_separates_neighbours():
    order = np.array(_epoch(5000, 1))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).sum() < 12


def test_shuffle_epochs_differ_between_seeds():
    # Grain alone would add them: epoch 1 of seed 0 would be epoch 0 of seed 1.
    orders = {tuple(_epoch(50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_order_digest_detects_another_shuffle():
    # Not a promise of Grain's: where this fails, checkpoints of before are refused (order_digest).
    assert _epoch(8, 0) == GOLDEN
    assert order_digest() == "6c375f4b"


def test_more_rows_than_grain_permutes_are_refused():
    with pytest.raises(DataError, match="longer than the shuffle can take"):
        shuffle_place(0, size=2**32, seed=0)


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((0.7, 0.3), (7, 3)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((2.0, 4.0), (1, 2)), ((5.0,), (1,))],
)
def test_decimal_weights_become_integers(weights, whole):
    assert whole_weights(weights) == whole


@hypothesis.given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 2000))
def test_parts_interleave_in_exact_proportions(weights, number):
    total = sum(weights)
    counts = interleaved_counts(number, weights)
    assert sum(counts) == number
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - number * weight / total) < len(weights)
    assert interleaved_counts(number * total, weights) == [number * weight for weight in weights]
    part, place = interleave(number, weights)
    assert place == counts[part]
    after = interleaved_counts(number + 1, weights)
    assert [a - b for a, b in zip(after, counts, strict=True)] == [
        int(i == part) for i in range(len(weights))
    ]


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4)
)
def test_interleaved_length_is_the_longest_without_repeats(parts):
    sizes, weights = [size for size, _ in parts], [weight for _, weight in parts]
    length = interleaved_length(sizes, weights)
    fits = lambda n: all(  # noqa: E731
        count <= size for count, size in zip(interleaved_counts(n, weights), sizes, strict=True)
    )
    assert fits(length) and not fits(length + 1)
