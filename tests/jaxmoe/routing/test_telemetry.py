# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Telemetry of every run: loads over steps, and biases."""

import jax.numpy as jnp

from jaxmoe.routing import telemetry
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


def test_biases_are_found_by_name():
    state = {"centroids": jnp.ones((2, 3, 4)), "selection": {"bias": jnp.asarray([[1.0, -2.0]])}}
    assert_close(telemetry.watch_state(state), {"bias_range": 3.0, "bias_max": 2.0}, "elementwise")
    assert telemetry.watch_state({}) == {}
