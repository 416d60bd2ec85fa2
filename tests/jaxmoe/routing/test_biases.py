# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Selection biases: properties of the dual that they minimise, and the loads that they reach.

To add a bias: its configs in BIAS_CASES.
"""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.routing import (
    BIASES,
    BipConfig,
    Extent,
    LossFreeConfig,
    QuantileConfig,
    SoftmaxTopKConfig,
)
from jaxmoe.routing.biases import SelectionBias
from jaxmoe.scaling.initialize import init_params
from sharding import MeshConfig, make_mesh
from tests.support.models import TINY, tokens_for
from tests.support.selection import chosen_sum, dual_objective, inputs_for, loads, one_step, skewed
from tests.support.tolerances import assert_close

BIAS_CASES = {
    "loss_free": (
        LossFreeConfig(rate=0.01),
        LossFreeConfig(rule="rms", is_zero_sum=True, schedule="inverse_sqrt", limit=0.5),
    ),
    "bip": (
        BipConfig(form="batch"),
        BipConfig(form="batch", scope="batch", start="state"),
        BipConfig(form="histogram"),
        BipConfig(form="online"),
    ),
    "quantile": (QuantileConfig(form="histogram"), QuantileConfig(form="exact")),
}
EVERY = [
    pytest.param(config, id=f"{name}-{index}")
    for name, configs in BIAS_CASES.items()
    for index, config in enumerate(configs)
]
every_bias = pytest.mark.parametrize("config", EVERY)

TOKENS, EXPERTS, TOP_K = 32, 6, 2


def test_case_table_equals_registry():
    assert set(BIAS_CASES) == set(BIASES)
    for name, configs in BIAS_CASES.items():
        assert {type(config) for config in configs} == {BIASES[name]}
        assert all(isinstance(config, SelectionBias) for config in configs)


# What every bias promises.


@pytest.mark.rows(4)
@every_bias
def test_bias_is_updated_from_statistics_and_has_no_gradient(config):
    scores, state = skewed(TOKENS, EXPERTS), config.init(EXPERTS)
    mask = jnp.ones(TOKENS, bool)
    new = one_step(config, state, scores, mask, jnp.int32(0), top_k=TOP_K)[1]
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
    assert np.abs(new["bias"]).max() > 0.0

    def preferred(scores, bias):
        told = {**state, "bias": bias}
        preference, _ = config.prefer(told, scores, inputs_for(scores), top_k=TOP_K, train=True)
        return preference.sum()

    by_scores = jax.grad(preferred)(scores, state["bias"])
    assert not by_scores.any()


@every_bias
def test_gates_use_the_unbiased_score(config):
    scores = skewed(TOKENS, EXPERTS)
    state = {**config.init(EXPERTS), "bias": jnp.linspace(1.0, -1.0, EXPERTS)}
    mask = jnp.ones(TOKENS, bool)
    _, _, output = one_step(config, state, scores, mask, jnp.int32(0), top_k=TOP_K, train=False)
    ids = np.asarray(output.selection.expert_ids).reshape(TOKENS, TOP_K)
    wanted = np.log(np.take_along_axis(np.asarray(scores), ids, axis=1))
    assert_close(output.selection.scores.reshape(TOKENS, TOP_K), wanted, "elementwise")


@every_bias
def test_padding_does_not_change_the_state(config):
    """The same real tokens with and without padding among them: the same state, bit by bit."""
    scores = skewed(TOKENS, EXPERTS)
    mask = np.arange(TOKENS) % 4 != 1
    state = config.init(EXPERTS)
    padded = jnp.where(mask[:, None], scores, 1e-3)
    ours = one_step(config, state, padded, jnp.asarray(mask), jnp.int32(0), top_k=TOP_K)
    plain = one_step(
        config, state, scores[mask], jnp.ones(mask.sum(), bool), jnp.int32(0), top_k=TOP_K
    )
    jax.tree.map(np.testing.assert_array_equal, ours[1], plain[1])
    np.testing.assert_array_equal(np.asarray(ours[0])[mask], plain[0])


@pytest.mark.rows(8)
@every_bias
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 1), (1, EXPERTS), (TOKENS, EXPERTS)])
def test_extreme_sizes_stay_finite(config, top_k, tokens):
    state = config.init(EXPERTS)
    mask = jnp.ones(tokens, bool)
    preference, new, _ = one_step(
        config, state, skewed(tokens, EXPERTS), mask, jnp.int32(0), top_k=top_k
    )
    assert np.isfinite(preference).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
    if not tokens:
        jax.tree.map(np.testing.assert_array_equal, new, state)


@every_bias
def test_evaluation_depends_on_the_state_alone(config):
    state = {**config.init(EXPERTS), "bias": jnp.linspace(0.2, -0.2, EXPERTS)}
    scores, mask = skewed(TOKENS, EXPERTS), jnp.ones(TOKENS, bool)
    whole, same, _ = one_step(config, state, scores, mask, jnp.int32(0), top_k=TOP_K, train=False)
    first = one_step(config, state, scores[:3], mask[:3], jnp.int32(0), top_k=TOP_K, train=False)
    np.testing.assert_array_equal(whole[:3], first[0])
    if config.name != "loss_free":  # loss_free reads the counts alone
        jax.tree.map(np.testing.assert_array_equal, same, state)


@pytest.mark.rows(4)
@every_bias
def test_eight_devices_equal_one(config):
    """Rows of a batch over (data, expert), positions over seq: the same choice and state."""
    rows, length = 4, TOKENS // 2
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "seq"))
    spread = PartitionSpec(("data", "expert"), "seq")
    scores = skewed(rows * length, EXPERTS, seed=3).reshape(rows, length, EXPERTS)
    mask = jnp.asarray(np.random.default_rng(0).random((rows, length)) < 0.8)
    state = {**config.init(EXPERTS), "bias": jnp.linspace(0.02, -0.02, EXPERTS)}
    router = SoftmaxTopKConfig(bias=config).build(
        num_experts=EXPERTS, top_k=TOP_K, embed_dim=EXPERTS
    )

    def route(scores, mask, extent):
        inputs = inputs_for(jnp.log(scores.reshape(-1, EXPERTS)), mask.reshape(-1), extent)
        output = router.route({"weight": jnp.eye(EXPERTS)}, state, inputs, train=True, key=None)
        return output.selection.expert_ids.reshape(*mask.shape, TOP_K), output.statistics

    def local(scores, mask):
        extent = Extent(
            sequence_length=length // 2, sequence_axes=("seq",), batch_axes=("data", "expert")
        )
        ids, statistics = route(scores, mask, extent)
        return ids, jax.lax.psum(statistics, ("data", "expert", "seq"))

    spread_route = jax.shard_map(
        local, mesh=mesh, in_specs=(spread, spread), out_specs=(spread, PartitionSpec())
    )
    placed = jax.device_put((scores, mask), NamedSharding(mesh, spread))
    ids, statistics = jax.jit(spread_route)(*placed)
    wanted_ids, wanted = jax.jit(lambda s, m: route(s, m, Extent(sequence_length=length)))(
        scores, mask
    )
    np.testing.assert_array_equal(ids, wanted_ids)
    assert_close(statistics.extra, wanted.extra, "matmul")
    ours, theirs = (router.update(state, each, jnp.int32(0)) for each in (statistics, wanted))
    assert_close(ours, theirs, "elementwise")
    for name in ("quantile_histogram", "bip_histogram"):
        if name in wanted.extra:
            np.testing.assert_array_equal(statistics.extra[name], wanted.extra[name])
            np.testing.assert_array_equal(ours["bias"], theirs["bias"])


@pytest.mark.slow
@pytest.mark.parametrize("config", [BipConfig(scope="batch"), QuantileConfig()], ids=["bip", "qb"])
def test_model_on_a_mesh_equals_one_device(config):
    moe = dataclasses.replace(TINY.moe, router=SoftmaxTopKConfig(bias=config))
    model = dataclasses.replace(TINY, moe=moe)
    tokens, _ = tokens_for(model)

    def statistics(mesh):
        def run(params, tokens):
            return forward(model, ExecutionConfig(), params, tokens, train=True).statistics

        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            return jax.jit(run)(init_params(model, jax.random.key(0), mesh=mesh), tokens)

    mesh = make_mesh(MeshConfig(data=2, expert=2), jax.devices()[:4])
    assert_close(statistics(mesh), statistics(None), "end_to_end")


# Loss-free.


def dual(scores, bias, top_k):
    mask = jnp.ones(scores.shape[0], bool)
    chosen = chosen_sum(scores, jnp.asarray(bias), mask, top_k=top_k)
    return float(dual_objective(chosen, jnp.float32(scores.shape[0]), bias, top_k=top_k))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16), rate=st.sampled_from([1e-3, 1e-2, 0.1]))
def test_loss_free_step_is_bounded_by_convexity_of_the_dual(seed, rate):
    """step . (A_old - L) <= D(new) - D(old) <= step . (A_new - L), by convexity."""
    config, tokens, mean = LossFreeConfig(rate=rate), 128, 128 * TOP_K / EXPERTS
    scores = skewed(tokens, EXPERTS, seed)
    old = jnp.asarray(np.random.default_rng(seed).normal(size=EXPERTS) * 0.1, jnp.float32)
    _, new, output = one_step(
        config, {"bias": old}, scores, jnp.ones(tokens, bool), jnp.int32(0), top_k=TOP_K
    )
    step = new["bias"] - old
    before, after = output.statistics.counts, loads(scores + new["bias"][None], TOP_K)
    change = dual(scores, new["bias"], TOP_K) - dual(scores, old, TOP_K)
    slack = 2e-5 * tokens  # rounding of two sums of 128 numbers of order 1
    assert float(step @ (before - mean)) - slack <= change <= float(step @ (after - mean)) + slack


@settings(max_examples=20)
@given(seed=st.integers(0, 2**16))
def test_loss_free_never_moves_tokens_to_overloaded_experts(seed):
    """No token leaves an expert with too few tokens for one with too many."""
    config, tokens = LossFreeConfig(rate=0.05), 64
    scores, state = skewed(tokens, EXPERTS, seed), LossFreeConfig().init(EXPERTS)
    mask, moves = jnp.ones(tokens, bool), 0
    for step in range(6):
        preference, new, output = one_step(
            config, state, scores, mask, jnp.int32(step), top_k=TOP_K
        )
        delta = np.asarray(new["bias"] - state["bias"])
        _, before = jax.lax.top_k(preference, TOP_K)
        _, after = jax.lax.top_k(scores + new["bias"][None], TOP_K)
        assert (before.reshape(-1) == output.selection.expert_ids).all()
        for left, right in zip(np.asarray(before), np.asarray(after), strict=True):
            leaving = sorted(delta[list(set(left) - set(right))])
            entering = sorted(delta[list(set(right) - set(left))])
            assert all(new >= old for new, old in zip(entering, leaving, strict=True))
            moves += len(entering)
        state = new
    assert moves  # or nothing was tried


def test_loss_free_is_invariant_under_a_constant():
    """A constant added to all biases changes neither the choice nor the dual."""
    scores, bias = skewed(TOKENS, EXPERTS), jnp.linspace(0.3, -0.3, EXPERTS)
    plain, moved = (jax.lax.top_k(scores + b[None], TOP_K)[1] for b in (bias, bias + 0.5))
    assert plain.tolist() == moved.tolist()
    assert_close(dual(scores, bias, TOP_K), dual(scores, bias + 0.5, TOP_K), "matmul")


def test_loss_free_evens_fixed_scores():
    """With a rate that is small against the gaps of the scores, a few tokens from even."""
    tokens, experts = 2048, 8
    scores, mask = skewed(tokens, experts, seed=1), jnp.ones(tokens, bool)
    config = LossFreeConfig(rate=1e-4)

    def step(_, state):
        return one_step(config, state, scores, mask, jnp.int32(0), top_k=TOP_K)[1]

    state = jax.lax.fori_loop(0, 8000, step, config.init(experts))
    error = loads(scores + state["bias"][None], TOP_K) - tokens * TOP_K / experts
    assert np.abs(error).max() <= 2 * (experts - 1)
    assert np.abs(loads(scores, TOP_K) - tokens * TOP_K / experts).max() > 500


def moved_by(config, counts, step=0, bias=None):
    """The change of the bias by one update."""
    counts = jnp.asarray(counts, jnp.float32)
    scores = skewed(4, counts.shape[0])
    _, _, output = one_step(
        config, config.init(counts.shape[0]), scores, jnp.ones(4, bool), jnp.int32(0), top_k=1
    )
    state = {"bias": jnp.zeros_like(counts) if bias is None else jnp.asarray(bias, jnp.float32)}
    statistics = output.statistics.replace(counts=counts)
    new = config.update(state, statistics, jnp.int32(step), top_k=1)
    return np.asarray(new["bias"] - state["bias"])


def test_rules_against_numpy():
    counts = np.array([9.0, 3.0, 0.0, 4.0])
    error = 4.0 - counts
    wanted = {
        "sign": np.array([-1.0, 1.0, 1.0, 0.0]),
        "proportional": error / 4.0,
        "rms": error / np.sqrt(np.mean(error**2)),
    }
    for rule, direction in wanted.items():
        ours = moved_by(LossFreeConfig(rate=0.5, rule=rule), counts)
        assert_close(ours, 0.5 * direction, "elementwise")
        centred = moved_by(LossFreeConfig(rate=0.5, rule=rule, is_zero_sum=True), counts)
        assert_close(centred, 0.5 * (direction - direction.mean()), "elementwise")
        for even in (np.full(4, 5.0), np.zeros(4)):
            assert not moved_by(LossFreeConfig(rate=0.5, rule=rule), even).any()


@pytest.mark.parametrize("num_experts", [3, 7, 12, 60, 96])
def test_loss_free_bias_stays_for_equal_loads_of_any_number_of_experts(num_experts):
    """Under jit XLA multiplies by a rounded 1/E: the mean of equal loads is not the load."""
    loads = jnp.asarray([1, 3, 5, 11, 13, 1001, 4099, 16_777_213 // num_experts], jnp.float32)
    for rule in ("sign", "proportional", "rms"):
        direction = jax.jit(jax.vmap(LossFreeConfig(rule=rule).direction))
        equal = jnp.broadcast_to(loads[:, None], (loads.size, num_experts))
        assert not np.asarray(direction(equal)).any(), rule
        uneven = equal.at[:, 0].add(1.0)
        assert (np.asarray(direction(uneven))[:, 0] < 0).all(), rule
        assert (np.asarray(direction(uneven))[:, 1:] > 0).all(), rule


@pytest.mark.parametrize(
    ("schedule", "wanted"), [("constant", 1.0), ("inverse", 0.25), ("inverse_sqrt", 0.5)]
)
def test_schedules(schedule, wanted):
    config = LossFreeConfig(rate=1.0, schedule=schedule, stop=5)
    assert_close(moved_by(config, [0, 2], step=3), wanted * np.array([1.0, -1.0]), "elementwise")
    assert not moved_by(config, [0, 2], step=5).any()


def test_limit():
    config = LossFreeConfig(rate=1.0, limit=0.25)
    assert moved_by(config, [0, 2]).tolist() == [0.25, -0.25]


# Refusals.


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LossFreeConfig(rate=-1.0), "bias.rate=-1.0 must be 0 or above, and finite"),
        (
            lambda: LossFreeConfig(limit=0.0),
            "bias.limit=0.0 must be above 0, or None for no limit",
        ),
        (
            lambda: LossFreeConfig(stop=-1),
            "bias.stop=-1 must be a step from 0 on, or None for never",
        ),
        (lambda: BipConfig(iterations=0), "bias.iterations=0 must be at least 1"),
        (
            lambda: BipConfig(decay=1.5),
            "bias.decay=1.5 must lie between 0 (the last step alone) and 1 (all)",
        ),
        (lambda: QuantileConfig(num_bins=1), "bias.num_bins=1 must be at least 2"),
        (
            lambda: QuantileConfig(decay=1.0),
            "bias.decay=1.0 must be at least 0 (no memory) and below 1 (no change)",
        ),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        make()
