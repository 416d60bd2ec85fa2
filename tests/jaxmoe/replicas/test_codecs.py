# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Codecs of messages between workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.replicas.e3m0 import TILE, e3m0

KEY = jax.random.key(0)


def sent(codec, x, state=None):
    """What a receiver holds of an array, and the next state."""
    payload, state = codec.encode(x, codec.init(x) if state is None else state, KEY)
    return codec.decode(payload, x), state


def relative_error(one, other):
    return float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))


def test_e3m0_error_on_gaussians():
    x = jax.random.normal(KEY, (512, 512))
    assert relative_error(sent(e3m0(), x)[0], x) == pytest.approx(0.194, abs=0.004)


@pytest.mark.parametrize("size", [1, 5, TILE, 3 * TILE + 7])
def test_e3m0_code_points_travel_unchanged(size):
    points = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
    points = np.concatenate([16 * np.ones(1), -points, points])
    x = jnp.asarray(0.5 * np.resize(points, size), jnp.float32)
    assert (sent(e3m0(), x)[0] == x).all()


def test_e3m0_takes_the_nearest_code_point():
    x = jnp.asarray([16.0, 0.124, 0.126, 0.37, 0.38, 2.9, 3.1, -11.9, -12.1], jnp.float32)
    nearest = [16.0, 0.0, 0.25, 0.25, 0.5, 2.0, 4.0, -8.0, -16.0]
    assert sent(e3m0(), x)[0].tolist() == nearest
    assert (sent(e3m0(), 0 * x)[0] == 0).all()
