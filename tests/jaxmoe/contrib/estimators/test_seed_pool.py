# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Sums of derivatives over a pool of seeds: replay, message and probabilities."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.estimators.seed_pool import SeedPoolConfig, SeedSums, probabilities, replay
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY
from tests.support.one_step import batch

RATE = 1e-3


@functools.cache
def _trained(choice, steps=4):
    """Parameters before and after some steps, and the last state."""
    table, optimizer = parameter_table(TINY), optax.sgd(RATE)
    config = SeedPoolConfig(seeds=8, directions=2, choice=choice)
    state = init_state(TINY, optimizer, jax.random.key(0), gradients=config)
    base = jax.tree.map(np.asarray, state.params)
    step = make_train_step(TINY, optimizer, table=table, gradients=config)
    for _ in range(steps):
        state, metrics = step(state, batch())
        assert not metrics.is_skipped
    refused = batch(loss_weight=float("nan"))
    after, metrics = step(jax.tree.map(jnp.array, state), refused)
    assert metrics.is_skipped
    return base, state, after


@pytest.mark.slow
def test_replay_of_the_sums_is_the_live_model():
    base, state, _ = _trained("weighted")
    table = parameter_table(TINY)
    found = replay(
        table, jax.tree.map(jnp.asarray, base), state.parts["gradients"].sums, state.rng, RATE
    )
    for one, live, old in zip(*map(jax.tree.leaves, (found, state.params, base)), strict=True):
        assert np.max(np.abs(live - old)) > 1e-5
        np.testing.assert_allclose(one, live, atol=3e-7)


@pytest.mark.slow
def test_refused_step_leaves_the_sums():
    _, state, after = _trained("weighted")
    for one, other in zip(*map(jax.tree.leaves, (state.parts, after.parts)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(state.parts["gradients"].counts.sum()) == 8.0


def test_message_is_below_18_kilobytes():
    sums = SeedPoolConfig().init(parameter_table(TINY)).sums
    assert sums.shape == (4096,) and len(np.asarray(sums).tobytes()) == 16384 <= 18000
    assert len(jax.tree.leaves(SeedPoolConfig().init(parameter_table(TINY)))) == 1


def test_probabilities_sum_to_one_and_follow_the_history():
    uniform = probabilities(SeedSums(sums=jnp.arange(5.0)))
    np.testing.assert_allclose(uniform, np.full(5, 0.2), rtol=1e-6)
    held = SeedSums(
        sums=jnp.zeros(4),
        magnitudes=jnp.asarray([0.0, 2.0, 8.0, 8.0]),
        counts=jnp.asarray([0.0, 1.0, 1.0, 3.0]),
    )
    weighted = np.asarray(probabilities(held))
    mean = np.asarray([0.0, 1.0, 4.0, 2.0]) / 4.0
    np.testing.assert_allclose(weighted, np.exp(mean) / np.exp(mean).sum(), rtol=1e-6)
    np.testing.assert_allclose(weighted.sum(), 1.0, rtol=1e-6)
    fresh = SeedPoolConfig(seeds=3, choice="weighted").init(parameter_table(TINY))
    np.testing.assert_allclose(probabilities(fresh), np.full(3, 1 / 3), rtol=1e-6)


def test_a_state_without_sums_is_refused():
    state = init_state(TINY, optax.sgd(RATE), jax.random.key(0))
    step = make_train_step(TINY, optax.sgd(RATE), gradients=SeedPoolConfig(seeds=8))
    with pytest.raises(ValueError, match=r"state.parts has no gradients, .*:seed_pool carries"):
        step(state, batch())
