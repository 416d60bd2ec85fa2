# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""BIP and Quantile Balancing: the dual they minimise, its optimum, the loads they reach."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.routing import (
    BipConfig,
    Extent,
    QuantileConfig,
)
from jaxmoe.routing.biases import bip
from tests.support.selection import bip_objective, inputs_for, loads, one_step, skewed, violation
from tests.support.tolerances import assert_close

TOKENS, EXPERTS, TOP_K = 32, 6, 2

# BIP.


def lp_optimum(scores, top_k, capacity):
    """max sum s x over 0 <= x <= 1, rows at most K, columns at most c."""
    tokens, experts = scores.shape
    rows = scipy.sparse.kron(scipy.sparse.eye(tokens), np.ones((1, experts)))
    columns = scipy.sparse.kron(np.ones((1, tokens)), scipy.sparse.eye(experts))
    solved = scipy.optimize.linprog(
        -np.asarray(scores, np.float64).ravel(),
        A_ub=scipy.sparse.vstack([rows, columns]),
        b_ub=np.concatenate([np.full(tokens, top_k), np.full(experts, capacity)]),
        bounds=(0, 1),
    )
    assert solved.status == 0
    return -solved.fun


@pytest.mark.parametrize("law", ["softmax", "sigmoid"])
def test_bip_iterations_never_increase_the_dual(law):
    """No half-step increases the dual, and it stays above the optimum of the LP."""
    tokens, experts, top_k = 96, 8, 2
    capacity = tokens * top_k // experts
    scores = skewed(tokens, experts, seed=2, law=law)
    optimum = lp_optimum(scores, top_k, capacity)
    p, q = jnp.zeros(tokens), jnp.zeros(experts)
    values = [bip_objective(scores, p, q, top_k=top_k, capacity=capacity)]
    for iterations in range(1, 9):
        p = jnp.maximum(jnp.sort(scores - q[None], axis=1)[:, -top_k - 1], 0.0)
        values.append(bip_objective(scores, p, q, top_k=top_k, capacity=capacity))
        config = BipConfig(iterations=iterations, max_iterations=1)
        ours = config.solve(
            scores[None], jnp.ones((1, tokens), bool), jnp.zeros(experts), top_k=top_k
        )[0]
        columns = jnp.sort(scores - p[:, None], axis=0)
        q = jnp.maximum(columns[-capacity - 1], 0.0)
        # Ours is the middle of the interval that begins at q, where the dual is flat.
        assert_close(ours, jnp.where(q > 0.0, 0.5 * (q + columns[-capacity]), 0.0), "elementwise")
        values.append(bip_objective(scores, p, q, top_k=top_k, capacity=capacity))
        flat = bip_objective(scores, p, ours, top_k=top_k, capacity=capacity)
        assert_close(flat, values[-1], "matmul")
    values = np.asarray(values, np.float64)
    rounding = 1e-5 * abs(optimum)
    assert (np.diff(values) <= rounding).all()
    assert (values >= optimum - rounding).all()
    assert values[-1] - optimum < 0.2 * (values[0] - optimum)


@pytest.mark.parametrize(("form", "bound"), [("batch", 0.15), ("histogram", 0.15)])
def test_bip_T8(form, bound):
    tokens, experts = 4096, 16
    scores = skewed(tokens, experts, seed=5)
    assert violation(loads(scores, 2)) > 2.0
    config = BipConfig(form=form, iterations=8, scope="batch")
    preference, _ = jax.jit(
        lambda s: config.prefer(config.init(experts), s, inputs_for(s), top_k=2, train=True)
    )(scores)
    assert violation(loads(preference, 2)) <= bound


def saturated(tokens, experts, seed, scale, skew):
    """Return softmax scores of sharp logits of a router that prefers some experts."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) + np.linspace(0.0, skew, experts)
    return jax.nn.softmax(jnp.asarray(scale * logits, jnp.float32))


SHARPNESS = ((1.0, 3.0), (1.0, 6.0), (4.0, 3.0), (8.0, 3.0), (16.0, 3.0))
"""Scale of the logits and preference for some experts, as training passes through them."""


@pytest.mark.parametrize(
    ("config", "tokens", "sharpness", "bound"),
    [
        (BipConfig(), 512, SHARPNESS, 0.1),
        (BipConfig(), 32, SHARPNESS, 0.38),
        (BipConfig(form="histogram", num_bins=8000), 512, SHARPNESS[:2], 0.1),
    ],
    ids=["batch", "short", "histogram"],
)
def test_bip_max_violation_of_normal_logits_that_grow_sharper(config, tokens, sharpness, bound):
    """The violation of each sequence on its own."""
    experts, extent = 8, Extent(sequence_length=tokens)

    @functools.partial(jax.jit, static_argnums=0)
    def prefer(config, scores):
        inputs = inputs_for(scores, extent=extent)
        return config.prefer(config.init(experts), scores, inputs, top_k=2, train=True)[0]

    fixed = dataclasses.replace(config, max_iterations=1)
    worst = {config: 0.0, fixed: 0.0}
    for scale, skew in sharpness:
        scores = jnp.concatenate([saturated(tokens, experts, i, scale, skew) for i in (0, 1)])
        for asked in worst:
            for part in jnp.split(prefer(asked, scores), 2):
                worst[asked] = max(worst[asked], violation(loads(part, 2)))
    assert worst[config] <= bound
    assert worst[fixed] > bound or tokens == 32  # 4 rounds are not enough


def alike(tokens, experts, seed, clusters, distance):
    """Return softmax scores of tokens of few kinds, whose logits differ by a small distance."""
    rng = np.random.default_rng(seed)
    kinds = 3.0 * rng.normal(size=(clusters, experts))
    logits = kinds[rng.integers(0, clusters, tokens)] + distance * rng.normal(
        size=(tokens, experts)
    )
    return jax.nn.softmax(jnp.asarray(logits, jnp.float32))


def test_bip_has_no_bound_on_the_violation_of_tokens_that_are_alike_or_saturated():
    """128 tokens for each expert: what the module promises, and what it does not."""
    tokens, experts, top_k = 512, 8, 2
    config = BipConfig()
    cases = {
        "normal": saturated(tokens, experts, 0, 1.0, 3.0),
        "saturated": saturated(tokens, experts, 0, 64.0, 3.0),
        "alike": alike(tokens, experts, 0, 4, 1e-3),
    }

    @jax.jit
    def solve(scores):
        mask = jnp.ones((1, tokens), bool)
        return config.solve(scores[None], mask, jnp.zeros(experts), top_k=top_k)[0]

    worst = {name: violation(loads(x - solve(x)[None], top_k)) for name, x in cases.items()}
    assert worst["normal"] <= config.max_violation
    assert min(worst["saturated"], worst["alike"]) > 0.3, worst


def test_bip_scopes_do_not_change_each_others_rounds():
    """A sequence that is even after T rounds has the same prices beside one that is not."""
    config, extent = BipConfig(), Extent(sequence_length=128)
    even, uneven = saturated(128, 8, 0, 1.0, 0.1), saturated(128, 8, 1, 1.0, 6.0)

    def prefer(scores):
        inputs = inputs_for(scores, extent=extent)
        return jax.jit(lambda s: config.prefer(config.init(8), s, inputs, top_k=2, train=True)[0])(
            scores
        )

    both = prefer(jnp.concatenate([even, uneven]))
    np.testing.assert_array_equal(both, jnp.concatenate([prefer(even), prefer(uneven)]))


def test_bip_does_not_change_an_even_load():
    scores = jnp.asarray(np.tile(np.eye(EXPERTS, dtype=np.float32) * 0.5, (4, 1)))
    q = BipConfig().solve(
        scores[None], jnp.ones((1, scores.shape[0]), bool), jnp.zeros(EXPERTS), top_k=1
    )
    assert not q.any()


def test_bip_state_is_the_mean_over_scopes():
    """Two sequences, solved apart in training; the state is the mean of their prices."""
    config, half = BipConfig(), TOKENS // 2
    scores = jnp.concatenate([skewed(half, EXPERTS, 1), skewed(half, EXPERTS, 2)[:, ::-1]])
    inputs = inputs_for(scores, extent=Extent(sequence_length=half))
    preference, extra = config.prefer(config.init(EXPERTS), scores, inputs, top_k=2, train=True)
    prices = np.stack([np.asarray(scores - preference)[row] for row in (0, half)])
    assert_close(extra["bip_price_sum"], prices.sum(0), "elementwise")
    assert extra["bip_scopes"] == 2.0
    _, _, output = one_step(
        config, config.init(EXPERTS), scores, jnp.ones(TOKENS, bool), jnp.int32(0), top_k=2
    )
    new = config.update(
        config.init(EXPERTS), output.statistics.replace(extra=extra), jnp.int32(0), top_k=2
    )
    assert_close(new["bias"], -prices.mean(0), "elementwise")


def test_bip_online_balances_later_steps():
    """With new tokens at each step the load is more even than without a bias."""
    config, tokens, experts = BipConfig(form="online", decay=0.5), 1024, 8
    state, mask = config.init(experts), jnp.ones(tokens, bool)
    for step in range(40):
        scores = skewed(tokens, experts, seed=step)
        preference, state, _ = one_step(config, state, scores, mask, jnp.int32(step), top_k=2)
    assert violation(loads(preference, 2)) < 0.35 < 1.0 < violation(loads(scores, 2))


# Quantile Balancing.


@pytest.mark.parametrize(
    ("form", "tokens", "bound"), [("exact", 4096, 0.05), ("histogram", 512, 0.10)]
)
@pytest.mark.parametrize("law", ["softmax", "sigmoid"])
def test_qb_T8(form, tokens, bound, law):
    experts, config = 16, QuantileConfig(form=form)
    scores, mask = skewed(tokens, experts, seed=5, law=law), jnp.ones(tokens, bool)

    @jax.jit
    def step(state):
        _, extra = config.prefer(state, scores, inputs_for(scores, mask), top_k=2, train=True)
        statistics = blank.replace(extra=extra)
        return config.update(state, statistics, jnp.int32(0), top_k=2)

    blank = one_step(config, config.init(experts), scores, mask, jnp.int32(0), top_k=2)[2]
    blank, state = blank.statistics, config.init(experts)
    for _ in range(8):
        state = step(state)
    assert_close(state["bias"].mean(), 0.0, "elementwise")
    preference = scores + state["bias"][None]
    assert violation(loads(preference, 2)) <= bound < 1.0 < violation(loads(scores, 2))


def test_quantile_gives_no_expert_more_than_its_share():
    """With a the old token prices, at most c tokens of a column lie above b's threshold."""
    config, tokens = QuantileConfig(form="exact"), 128
    scores = skewed(tokens, EXPERTS)
    state = config.init(EXPERTS)
    price = np.sort(scores, axis=1)[:, -TOP_K - 1]
    _, new, _ = one_step(config, state, scores, jnp.ones(tokens, bool), jnp.int32(0), top_k=TOP_K)
    _, extra = config.prefer(state, scores, inputs_for(scores), top_k=TOP_K, train=True)
    above = (price[:, None] - np.asarray(scores) < np.asarray(extra["quantile_sum"])).sum(0)
    assert above.max() == tokens * TOP_K // EXPERTS
    shift = np.asarray(new["bias"] - extra["quantile_sum"])
    assert_close(shift, np.full(EXPERTS, shift[0]), "elementwise")


def quantile_counts(config, bias, scores):
    _, extra = config.prefer({"bias": bias}, scores, inputs_for(scores), top_k=TOP_K, train=True)
    return extra["quantile_histogram"]


def test_quantile_histogram_is_bitwise_the_same_on_every_mesh():
    """Eight devices with different tokens, micro-batches, and one device."""
    config, bias = QuantileConfig(), jnp.linspace(0.1, -0.1, EXPERTS)
    scores = jnp.concatenate([skewed(64, EXPERTS, s)[:, :: 1 - 2 * (s % 2)] for s in range(8)])
    mesh = jax.make_mesh((8,), ("data",))

    def local(scores):
        return jax.lax.psum(quantile_counts(config, bias, scores), "data")

    spread = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
    )(jax.device_put(scores, NamedSharding(mesh, PartitionSpec("data"))))
    whole = jax.jit(functools.partial(quantile_counts, config, bias))(scores)
    parts = sum(quantile_counts(config, bias, part) for part in jnp.split(scores, 4))
    assert whole.dtype == jnp.int32 and whole.sum() == scores.size
    np.testing.assert_array_equal(spread, whole)
    np.testing.assert_array_equal(parts, whole)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), num_bins=st.sampled_from([50, 1000]))
def test_quantile_histogram_error_is_within_one_bin(seed, num_bins):
    scores = skewed(256, EXPERTS, seed)
    bias = jnp.asarray(np.random.default_rng(seed).normal(size=EXPERTS) * 0.1, jnp.float32)
    mask, step = jnp.ones(256, bool), jnp.int32(0)
    new = []
    for form in ("histogram", "exact"):
        config = QuantileConfig(form=form, num_bins=num_bins)
        new.append(one_step(config, {"bias": bias}, scores, mask, step, top_k=TOP_K)[1]["bias"])
    width = float(bias.max() - bias.min() + 2.0) / num_bins
    # Both are less their own mean, which is off by one bin at most as well.
    assert np.abs((new[0] - new[0][0]) - (new[1] - new[1][0])).max() <= 2.0 * width
    assert np.abs(new[0] - new[1]).max() <= 1.0 * width


@pytest.mark.parametrize("shape", [(1, 7, 5), (3, 16, 6)])
def test_bip_loads_equal_a_plain_count(shape):
    rng = np.random.default_rng(0)
    preference = rng.normal(size=shape).astype(np.float32)
    mask = rng.random(shape[:2]) < 0.7
    wanted = np.zeros((shape[0], shape[2]), np.int32)
    for scope, token in np.argwhere(mask):
        wanted[scope, np.argsort(-preference[scope, token])[:2]] += 1
    found = bip._loads(jnp.asarray(preference), jnp.asarray(mask), top_k=2)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == jnp.int32
