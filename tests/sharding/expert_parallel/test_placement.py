# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""ExpertPlacement: equal parts, an order of the experts and its inverse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.expert_parallel.placement import ExpertPlacement


def test_hand_drawn():
    placement = ExpertPlacement(np.array([[1, 0, 1, 0], [0, 0, 1, 1]]), 2)
    assert placement.order.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]
    assert placement.position.tolist() == [[2, 0, 3, 1], [0, 1, 2, 3]]


def test_identity_placement_moves_nothing():
    placement = ExpertPlacement.identity(3, 8, 4)
    assert placement.device_of.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 3
    assert placement.order.tolist() == placement.position.tolist() == [list(range(8))] * 3


@given(st.integers(0, 2**32 - 1), st.sampled_from([(1, 4), (2, 4), (4, 8), (3, 9)]))
def test_position_is_the_inverse_of_order(seed, sizes):
    devices, experts = sizes
    even = np.tile(np.arange(experts) // (experts // devices), (2, 1))
    placement = ExpertPlacement(np.random.default_rng(seed).permuted(even, axis=1), devices)
    back = np.take_along_axis(placement.order, placement.position, axis=1)
    assert (back == np.arange(experts)).all()
    share = experts // devices
    assert (placement.position // share == placement.device_of).all()


@pytest.mark.parametrize(
    ("devices", "number", "message"),
    [
        ([[0, 0, 0, 1]], 2, "device 0 holds 3 experts of layer 0, and every one of the 2 must"),
        ([[0, 1, 2, 2]], 2, "must hold 2 of 4"),
        ([[0, 1, 2, 0]], 3, "3 devices cannot hold equal parts of 4 experts: choose 1, 2, 4"),
    ],
)
def test_unequal_parts_raise(devices, number, message):
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(np.array(devices), number)
