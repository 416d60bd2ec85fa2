# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Speculative token shuffling: equal shares, an inverse, the more confident table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmoe.contrib.token_routes.token_shuffle import (
    TokenTables,
    count_local,
    homes,
    order_tokens,
    predict,
    shuffle,
)
from sharding.expert_parallel import ExpertAxes

TOKENS, DEVICES = 24, 4
shuffled = jax.jit(shuffle, static_argnums=2)


def test_the_more_confident_table_decides():
    tables = TokenTables(
        id_device=jnp.array([0, 1, 2], jnp.int32),
        id_confidence=jnp.array([0.9, 0.5, 0.0]),
        next_device=jnp.array([3, 1, 2, 0], jnp.int32),
        next_confidence=jnp.array([0.6, 0.5, 0.1, 0.95]),
    )
    ids = jnp.array([0, 1, 1, 2, 0, 0, 2], jnp.int32)
    below = jnp.array([0, 0, 1, 2, 3, -1, -1], jnp.int32)
    device, confidence = predict(tables, ids, below)
    # Token by token: id, layer below, a tie (id), unseen id, layer below, first layer, nothing.
    assert device.tolist() == [0, 3, 1, 2, 0, 0, 2]
    np.testing.assert_allclose(confidence, [0.9, 0.6, 0.5, 0.1, 0.95, 0.9, 0.0])


@given(st.integers(0, 2**32 - 1), st.integers(1, DEVICES))
def test_shares_are_equal_and_the_most_confident_stay(seed, popular):
    """Compared with a loop over each device's queue."""
    rng = np.random.default_rng(seed)
    device = rng.integers(popular, size=TOKENS)
    confidence = rng.integers(4, size=TOKENS) / 4  # with ties
    given = (jnp.asarray(device, jnp.int32), jnp.asarray(confidence, jnp.float32))
    order, inverse = map(np.asarray, shuffled(*given, DEVICES))
    assert sorted(order) == list(range(TOKENS))
    assert (order[inverse] == np.arange(TOKENS)).all() and (
        inverse[order] == np.arange(TOKENS)
    ).all()
    places = TOKENS // DEVICES
    where = inverse // places
    for c in range(DEVICES):
        queue = sorted(np.flatnonzero(device == c), key=lambda t: (-confidence[t], t))
        assert (where[queue[:places]] == c).all()
        assert (where[queue[places:]] != c).all()


def test_unequal_shares_of_tokens_raise():
    with pytest.raises(ValueError, match="24 tokens of a device must be divisible by"):
        shuffled(jnp.zeros(TOKENS, jnp.int32), jnp.ones(TOKENS), 5)


def test_a_planted_affinity_makes_assignments_local():
    """Token id j has the experts of device j % P: all are local after shuffling, 1/P before."""
    places, experts, vocab_size = 6, 8, 12
    axes, tokens = ExpertAxes(expert=("expert",)), PartitionSpec("expert")
    mesh = jax.make_mesh((DEVICES,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:DEVICES])
    ids = np.tile(np.arange(vocab_size), 2 * DEVICES)  # 24 on every device
    chosen = np.stack([2 * (ids % DEVICES), 2 * (ids % DEVICES) + 1], 1)
    chosen[:places] = experts  # padding, of every id
    tables = TokenTables(
        id_device=jnp.arange(vocab_size, dtype=jnp.int32) % DEVICES,
        id_confidence=jnp.ones(vocab_size),
        next_device=jnp.zeros(DEVICES, jnp.int32),
        next_confidence=jnp.zeros(DEVICES),
    )

    def local(ids, chosen):
        below = jnp.full_like(ids, -1)
        order = order_tokens(tables, ids, chosen[:, 0] < experts, below, DEVICES)
        counted = count_local(chosen, order, experts, axes)
        return jax.lax.psum(counted, "expert"), order.order, homes(chosen, experts, axes)

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(tokens, tokens), out_specs=(PartitionSpec(), tokens, tokens)
    )
    given = (jnp.asarray(ids, jnp.int32), jnp.asarray(chosen, jnp.int32))
    counted, order, home = map(np.asarray, jax.jit(run)(*given))
    number, moved, still = counted.tolist()
    real = ids.size - places
    assert number == moved == 2 * real
    assert still == 2 * sum(
        ids[t] % DEVICES == t // TOKENS and t >= places for t in range(ids.size)
    )
    assert np.array_equal(home, np.where(np.arange(ids.size) < places, -1, ids % DEVICES))
    assert all(sorted(part) == list(range(TOKENS)) for part in order.reshape(DEVICES, TOKENS))
