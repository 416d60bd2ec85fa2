# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The shuffled order: a permutation for every size, spread evenly, and fixed for ever."""

import collections
import itertools

import numpy as np
import pytest

from jaxmoe.data.permutation import permuted

GOLDEN = [5, 7, 6, 3, 0, 4, 1, 2]


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 65537])
def test_every_item_once(size):
    order = permuted(np.arange(size), size=size, seed=(3, 1))
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_random_access_agrees_with_the_whole():
    order = permuted(np.arange(1000), size=1000, seed=(0, 7))
    for index in (0, 1, 500, 999):
        assert permuted(np.array([index]), size=1000, seed=(0, 7))[0] == order[index]


def test_size_beyond_memory():
    indices = np.array([0, 1, 2**40 - 1, 2**39])
    order = permuted(indices, size=2**40, seed=(0,))
    assert len(set(order.tolist())) == 4
    assert (order >= 0).all() and (order < 2**40).all()


def test_all_orders_of_four_are_about_equally_likely():
    trials = 24 * 100
    seen = collections.Counter(
        tuple(permuted(np.arange(4), size=4, seed=(seed, 0)).tolist()) for seed in range(trials)
    )
    assert set(seen) == set(itertools.permutations(range(4)))
    # 23 degrees of freedom: above 60 with probability 4e-5, for seeds that are fixed.
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 60


def test_neighbours_are_torn_apart():
    size = 10_000
    order = permuted(np.arange(size), size=size, seed=(1, 2))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).sum() < 12


def test_the_order_is_a_promise():
    # A checkpoint resumes in this order: the numbers may never change.
    np.testing.assert_array_equal(permuted(np.arange(8), size=8, seed=(0, 0)), GOLDEN)
