# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Telemetry of every run: loads over steps, and biases."""

import jax.numpy as jnp
import numpy as np

from jaxmoe.routing import RouterStatistics, telemetry
from jaxmoe.routing.replay import REPLAYED
from jaxmoe.tracking.history import load_metrics
from tests.support.tolerances import assert_close


def test_load_window_adds_loads_over_steps():
    """Two experts alternate: every step is maximally uneven, the window is even."""
    first, second = jnp.asarray([[1.0, 0.0]]), jnp.asarray([[0.0, 1.0]])
    window = telemetry.LoadWindow.empty(first)
    for load in (first, second):
        window = window.add(load)
    wanted = {
        "max_violation_window": [0.0],
        "max_violation_mean": [1.0],
        "max_violation_sup": [1.0],
    }
    assert {name: value.tolist() for name, value in window.summarise().items()} == wanted


def test_a_batch_of_padding_leaves_the_window_finite():
    empty, uneven = jnp.zeros((1, 2)), jnp.asarray([[1.0, 0.0]])
    window = telemetry.LoadWindow.empty(empty).add(empty)
    assert all(value.tolist() == [0.0] for value in window.summarise().values())
    wanted = {
        "max_violation_window": [1.0],
        "max_violation_mean": [0.5],
        "max_violation_sup": [1.0],
    }
    later = window.add(uneven).summarise()
    assert {name: value.tolist() for name, value in later.items()} == wanted
    scalars, _ = load_metrics(np.zeros((1, 2)))
    assert scalars["router/layer_00/max_violation"] == 0.0
    assert scalars["router/layer_00/min_violation"] == 0.0


def test_nothing_routed_is_nothing_dropped_and_no_violation():
    zeros = jnp.zeros((2, 3))
    statistics = RouterStatistics(
        num_tokens=zeros[:, 0],
        counts=zeros,
        kept=zeros,
        prob_sum=zeros,
        z_sum=zeros[:, 0],
        entropy_sum=zeros[:, 0],
        extra={REPLAYED: jnp.zeros((2, 2))},
    )
    summary = telemetry.summarise(statistics)
    names = ("dropped_fraction", "max_violation", "max_violation_worst", "min_violation")
    for name in (*names, "avg_violation", "replayed", "replay_changed"):
        assert summary[name] == 0.0, name
    assert telemetry.dropped_fraction(statistics).tolist() == [0.0, 0.0]


def test_biases_are_found_by_name():
    state = {"centroids": jnp.ones((2, 3, 4)), "selection": {"bias": jnp.asarray([[1.0, -2.0]])}}
    assert_close(telemetry.watch_state(state), {"bias_range": 3.0, "bias_max": 2.0}, "elementwise")
    assert telemetry.watch_state({}) == {}
