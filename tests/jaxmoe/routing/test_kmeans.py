# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Online K-means: the closed form of its centroids, what it depends on, and a toy mixture."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.data.batch import Batch
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.optim import adamw
from jaxmoe.routing import KMeansConfig, LossFreeConfig, RouterInputs, SoftmaxGateConfig
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY, tokens_for
from tests.support.tolerances import assert_close

TOKENS, WIDTH, EXPERTS, TOP_K = 24, 5, 6, 2


def build(config=None, top_k=TOP_K):
    config = config or KMeansConfig()
    return config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)


def drawn(seed, tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, WIDTH)), jnp.float32)


def inputs_for(x, mask=None):
    tokens = x.shape[0]
    mask = jnp.ones(tokens, bool) if mask is None else mask
    return RouterInputs(x=x, token_mask=mask, segment_ids=jnp.ones(tokens, jnp.int32))


@functools.partial(jax.jit, static_argnames=("router", "train"))
def route(router, state, x, mask=None, train=True):
    return router.route({}, state, inputs_for(x, mask), train=train, key=None)


def test_no_parameters():
    params, state = build().init(jax.random.key(0))
    assert params == {} == build().declarations()
    assert_close(jnp.linalg.norm(state["centroids"], axis=1), np.ones(EXPERTS), "elementwise")


def test_the_nearest_in_direction_are_chosen():
    router = build(KMeansConfig(bias=None))
    _, state = router.init(jax.random.key(1))
    x, means = drawn(1), np.asarray(state["centroids"], np.float64)
    cosines = np.asarray(x, np.float64) @ means.T
    cosines /= np.linalg.norm(x, axis=1, keepdims=True) * np.linalg.norm(means, axis=1)
    output = route(router, state, x)
    wanted = np.argsort(-cosines, axis=1, kind="stable")[:, :TOP_K]
    assert output.selection.expert_ids.tolist() == wanted.ravel().tolist()
    assert_close(output.logits, cosines / 0.1, "matmul")
    scores = cosines / 0.1 - np.log(np.exp(cosines / 0.1).sum(1, keepdims=True))
    chosen = np.take_along_axis(scores, wanted, axis=1).ravel()
    assert_close(output.selection.scores, chosen, "matmul")


def test_permuting_centroids_permutes_the_ids():
    router, order = build(), np.random.default_rng(1).permutation(EXPERTS)
    _, state = router.init(jax.random.key(1))
    moved = jax.tree.map(lambda leaf: leaf[order], state)
    plain, permuted = (route(router, each, drawn(2)) for each in (state, moved))
    assert order[permuted.selection.expert_ids].tolist() == plain.selection.expert_ids.tolist()
    assert_close(permuted.selection.scores, plain.selection.scores, "elementwise")


def test_centroids_follow_the_moving_average():
    """The closed form: decay^n of the start, plus what each step's mean still weighs."""
    router, steps, decay = build(KMeansConfig(decay=0.9)), 5, 0.9
    _, state = router.init(jax.random.key(2))
    start, wanted = state, np.asarray(state["centroids"], np.float64)
    last = np.zeros(EXPERTS)
    for step in range(steps):
        x, mask = drawn(step), np.random.default_rng(step).random(TOKENS) < 0.7
        output = route(router, state, jnp.where(mask[:, None], x, jnp.inf), jnp.asarray(mask))
        ids = np.asarray(output.selection.expert_ids).reshape(TOKENS, TOP_K)
        for expert in range(EXPERTS):
            mine = np.asarray(x, np.float64)[(ids == expert).any(1)]
            if len(mine):
                wanted[expert] = decay * wanted[expert] + (1 - decay) * mine.mean(0)
                last[expert] = step
        state = router.update(state, output.statistics, jnp.int32(step))
    assert_close(state["centroids"], wanted, "matmul")
    assert np.abs(state["centroids"] - start["centroids"]).max() > 0.1
    # One expert that is never chosen stays where it was.
    far = {**start, "centroids": start["centroids"].at[0].set(-100.0 * jnp.ones(WIDTH))}
    output = route(build(top_k=1), far, jnp.abs(drawn(9)))
    assert output.statistics.counts[0] == 0.0
    after = build(top_k=1).update(far, output.statistics, jnp.int32(0))
    np.testing.assert_array_equal(after["centroids"][0], far["centroids"][0])


def test_statistics_of_evaluation_leave_the_centroids():
    router = build()
    _, state = router.init(jax.random.key(0))
    output = route(router, state, drawn(0), train=False)
    after = router.update(state, output.statistics, jnp.int32(0))
    np.testing.assert_array_equal(after["centroids"], state["centroids"])


def test_eight_devices_equal_one():
    """Eight devices choose, sum and update as one."""
    router, mesh = build(), jax.make_mesh((2, 4), ("data", "expert"))
    spread = PartitionSpec(("data", "expert"))
    _, state = router.init(jax.random.key(3))
    x, mask = drawn(3), jnp.asarray(np.arange(TOKENS) % 5 != 2)

    def local(x, mask):
        output = router.route({}, state, inputs_for(x, mask), train=True, key=None)
        return output.selection.expert_ids, jax.lax.psum(output.statistics, ("data", "expert"))

    run = jax.shard_map(
        local, mesh=mesh, in_specs=(spread, spread), out_specs=(spread, PartitionSpec())
    )
    ids, statistics = jax.jit(run)(*jax.device_put((x, mask), NamedSharding(mesh, spread)))
    whole = route(router, state, x, mask)
    assert ids.tolist() == whole.selection.expert_ids.tolist()
    ours, theirs = (
        router.update(state, each, jnp.int32(0)) for each in (statistics, whole.statistics)
    )
    assert_close(ours, theirs, "matmul")


def test_choice_is_independent_of_the_norm_of_x():
    router = build()
    _, state = router.init(jax.random.key(4))
    x = drawn(4)
    size = jnp.linspace(0.01, 100.0, TOKENS)[:, None]
    plain, scaled = route(router, state, x), route(router, state, x * size)
    assert plain.selection.expert_ids.tolist() == scaled.selection.expert_ids.tolist()
    assert_close(scaled.selection.scores, plain.selection.scores, "matmul")


def test_gradients_reach_x_and_not_the_centroids():
    router = build()
    _, state = router.init(jax.random.key(5))

    def gates(x, centroids):
        output = route(router, {**state, "centroids": centroids}, x)
        gates = SoftmaxGateConfig()(output.selection, output.selection.scores)
        return gates[0] + output.statistics.prob_sum[0]

    x = drawn(5).at[3].set(0.0)
    by_x, by_centroids = jax.grad(gates, argnums=(0, 1))(x, state["centroids"])
    assert not by_centroids.any()
    assert np.isfinite(by_x).all() and np.abs(by_x).max() > 1e-3


@pytest.mark.slow
def test_a_bias_evens_the_load_of_a_toy_mixture():
    """Clusters of unequal size: stuck without a bias, even with one."""
    experts, width, tokens = 8, 16, 512
    rng = np.random.default_rng(0)
    centers = jnp.asarray(rng.normal(size=(experts, width)), jnp.float32)
    shares = jnp.asarray(np.arange(1, experts + 1) / 36.0, jnp.float32)

    def violation_of(bias):
        config = KMeansConfig(bias=bias)
        router = config.build(num_experts=experts, top_k=1, embed_dim=width)
        _, state = router.init(jax.random.key(0))

        def step(carry, number):
            state, counts = carry
            key, other = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
            kinds = jax.random.categorical(key, jnp.log(shares), shape=(tokens,))
            x = centers[kinds] + jax.random.normal(other, (tokens, width))
            output = router.route({}, state, inputs_for(x), train=True, key=None)
            counts = jnp.where(number < 800, 0.0, counts + output.statistics.counts)
            return (router.update(state, output.statistics, number), counts), None

        start = (state, jnp.zeros(experts))
        (_, counts), _ = jax.lax.scan(step, start, jnp.arange(1000, dtype=jnp.int32))
        return float(counts.max() / counts.mean() - 1.0)

    assert violation_of(LossFreeConfig()) < 0.1
    assert violation_of(None) > 0.8


@pytest.mark.slow
def test_trains_a_model_with_distinct_centroids_per_layer():
    moe = dataclasses.replace(TINY.moe, router=KMeansConfig(decay=0.5))
    model = dataclasses.replace(TINY, moe=moe)
    first, second = initial_router_state(model)["centroids"]
    assert np.abs(first - second).max() > 0.1
    optimizer = adamw(1e-3)
    state = init_state(model, optimizer, jax.random.key(0))
    before = np.asarray(state.router_state["centroids"])
    tokens, targets = tokens_for(model)
    batch = Batch(tokens=tokens, targets=targets, loss_weights=jnp.ones(tokens.shape))
    state, metrics = make_train_step(model, optimizer)(state, batch)
    assert np.isfinite(metrics.loss) and not metrics.is_skipped
    assert np.abs(state.router_state["centroids"] - before).max() > 0.01
    assert metrics.router["bias_range"] > 0.0


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"decay": 1.0},
            "router.decay=1.0 must be at least 0 (no memory) and below 1 (no change)",
        ),
        ({"temperature": 0.0}, "router.temperature=0.0 must be above 0, and finite"),
    ],
)
def test_refusals(fields, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        KMeansConfig(**fields)
