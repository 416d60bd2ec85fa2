# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Codecs of messages between workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.slow_links.codec import error_feedback
from jaxmoe.contrib.slow_links.codecs.e3m0 import TILE, e3m0
from jaxmoe.contrib.slow_links.codecs.top_k import (
    pack_twelve,
    pack_two,
    tiling,
    top_k,
    two_bits,
    unpack_twelve,
    unpack_two,
)
from jaxmoe.contrib.slow_links.fragments import Leaf
from sharding import axes as ax

KEY = jax.random.key(0)


def sent(codec, x, state=None):
    """What a receiver holds of an array, and the next state."""

    @jax.jit
    def run(x, state):
        payload, state = codec.encode(x, state, KEY)
        return codec.decode(payload, x), state

    return run(x, codec.init(x) if state is None else state)


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


def leaf_of(shape, axes):
    return Leaf("x", shape, axes, "expert_in", axes[0] == ax.LAYERS)


MATRIX = leaf_of((256, 320), (ax.EMBED, ax.MLP))
EXPERTS = leaf_of((2, 3, 12, 2, 10), (ax.LAYERS, ax.EXPERTS, ax.EXPERT_EMBED, None, ax.EXPERT_MLP))


@pytest.mark.parametrize(
    ("pack", "unpack", "bits"), [(pack_twelve, unpack_twelve, 12), (pack_two, unpack_two, 2)]
)
def test_small_integers_round_trip(pack, unpack, bits):
    for size in (1, 6, 4099):
        numbers = jnp.arange(size, dtype=jnp.int32)[::-1] % 2**bits
        packed = jax.jit(pack)(numbers)
        assert (jax.jit(unpack, static_argnums=1)(packed, size) == numbers).all()
        together = {12: 2, 2: 4}[bits]
        assert packed.nbytes == -(-size // together) * together * bits // 8


def test_two_bits_preserve_the_sum():
    x = jax.random.normal(KEY, (4, 4096)) + 0.3
    kept = jnp.sort(jnp.abs(x), axis=1)[:, -64:] * jnp.sign(x[:, -64:])
    codes, table = two_bits(kept)
    values = jnp.take_along_axis(table, codes, axis=1)
    np.testing.assert_allclose(values.sum(1), kept.sum(1), rtol=1e-5)
    assert (two_bits(0 * kept)[1] == 0).all()
    assert relative_error(values, kept) == pytest.approx(0.083, abs=0.02)


def test_top_k_keeps_the_largest_of_each_tile():
    x = jax.random.normal(KEY, MATRIX.shape)
    tiles = tiling(x.shape, 0, 64 / 4096).cut(x)
    got = tiling(x.shape, 0, 64 / 4096).cut(sent(top_k(MATRIX, 64 / 4096, "float32"), x)[0])
    assert tiles.shape == (4 * 5, 4096)
    for tile, kept in zip(np.asarray(tiles), np.asarray(got), strict=True):
        chosen = np.argsort(-np.abs(tile))[:64]
        assert sorted(np.flatnonzero(kept)) == sorted(chosen)
        assert (kept[chosen] == tile[chosen]).all()
    everything, _ = sent(top_k(MATRIX, 1.0, "float32"), x)
    assert (everything == x).all()


def test_tiles_never_span_experts():
    x = jax.random.normal(KEY, EXPERTS.shape)
    quiet = x.at[:, 1].multiply(1e-6)
    kept, _ = sent(top_k(EXPERTS, 64 / 4096, "two_bits"), quiet)
    count = (kept.reshape(2, 3, -1) != 0).sum(-1)
    # Tiles of 12 x 20: one in each expert, of which 240 / 64 = 4 numbers are kept.
    assert (count == 4).all()
    assert float(jnp.abs(kept[:, 1]).max()) < 1e-5
    again, _ = sent(top_k(EXPERTS, 64 / 4096, "two_bits"), x)
    assert (again[:, ::2] == kept[:, ::2]).all()


@pytest.mark.parametrize(("inner", "decay"), [("e3m0", 1.0), ("two_bits", 1.0), ("two_bits", 0.95)])
def test_errors_telescope(decay, inner):
    """sum decay^(T-t) sent_t + e_T == sum decay^(T-t) x_t in float64."""
    with jax.enable_x64(True):
        codec = e3m0() if inner == "e3m0" else top_k(EXPERTS, 1 / 64, "two_bits")
        codec = error_feedback(codec, decay)
        rng = np.random.default_rng(0)
        total = np.zeros(EXPERTS.shape)
        state, run = codec.init(jnp.asarray(total)), jax.jit(codec.encode)
        for _ in range(6):
            x = rng.standard_normal(EXPERTS.shape)
            payload, state = run(jnp.asarray(x), state, KEY)
            message = codec.decode(payload, jnp.asarray(x))
            total = decay * total + x - np.asarray(message)
        assert message.dtype == jnp.float64
        np.testing.assert_allclose(state[0], total, rtol=0, atol=1e-14)
        assert np.abs(total).max() > 0.1
