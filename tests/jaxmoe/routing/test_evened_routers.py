# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers that even the choice itself in training: Sinkhorn, Selective Sinkhorn, BASE."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import MoEConfig
from jaxmoe.routing import (
    BaseLayerConfig,
    CapacityConfig,
    Extent,
    ImportanceVariationConfig,
    LoadBalanceConfig,
    RenormalizedGateConfig,
    RouterZConfig,
    SelectiveSinkhornConfig,
    SinkhornConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
)
from jaxmoe.routing.routers.assignment.base_layer import assign
from jaxmoe.routing.routers.assignment.transport import scalings, sinkhorn
from tests.support.routing_inputs import (
    LENGTH,
    ROWS,
    TOKENS,
    WIDTH,
    by_token,
    drawn,
    inputs_of,
    route,
    route_on_eight_devices,
)
from tests.support.tolerances import assert_close

EXPERTS = 4
ALWAYS = SelectiveSinkhornConfig(probability=1.0)
EVENED = {
    "sinkhorn": SinkhornConfig(),
    "selective_sinkhorn": ALWAYS,
    "selective_sinkhorn, probs": dataclasses.replace(ALWAYS, cost="probs", entropy=0.1),
    "base_layer": BaseLayerConfig(),
}
every_evened = pytest.mark.parametrize("name", EVENED)


def build(config, top_k=2):
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    return router, router.init(jax.random.key(0))[0]


def uneven(seed, tokens=TOKENS):
    """Return activations whose last feature is 1, so that most prefer the same expert."""
    return drawn(seed, tokens=tokens).at[:, -1].set(1.0)


def leaning(params, size=2.0):
    """The router's weights with that preference."""
    return {"weight": params["weight"].at[-1].set(jnp.linspace(size, 0.0, EXPERTS))}


# Transport plans. Catalogue 7.


def plan_of(cost, iterations, mask=None):
    is_real = jnp.ones(cost.shape[:2], bool) if mask is None else jnp.asarray(mask)
    row, column = sinkhorn(cost, is_real, axes=(), iterations=iterations)
    return np.exp(np.asarray(cost + row[:, :, None] + column[:, None, :], np.float64))


def costs(seed, tokens=64, groups=2):
    values = np.random.default_rng(seed).normal(size=(groups, tokens, EXPERTS))
    return jnp.asarray(values + np.linspace(1.0, 0.0, EXPERTS), jnp.float32)


def test_sinkhorn_marginals():
    """Rows sum to 1 whatever the iterations; the error of the columns falls to 0."""
    cost = costs(0)
    errors = {}
    for iterations in (1, 2, 5, 20):
        plan = plan_of(cost, iterations)
        assert_close(plan.sum(2), np.ones((2, 64)), "elementwise")
        errors[iterations] = np.abs(plan.sum(1) - 64 / EXPERTS).max()
    assert errors[1] > errors[2] > errors[5] > errors[20]
    assert errors[1] > 0.1 and errors[20] < 1e-4


@pytest.mark.parametrize("entropy", [0.5, 1.0])
def test_columns_are_within_a_hundredth_of_a_token_after_20_iterations(entropy):
    logits = costs(1)
    for cost in (logits, jax.nn.softmax(logits, axis=-1)):
        plan = plan_of(cost / entropy, 20)
        assert np.abs(plan.sum(1) - 64 / EXPERTS).max() < 0.01


def test_sinkhorn_against_loops():
    """Alternate scalings of exp(cost) in f64."""
    cost = costs(2, tokens=12, groups=1)
    kernel = np.exp(np.asarray(cost[0], np.float64))
    u = np.ones(12)
    for _ in range(7):
        v = np.array([(12 / EXPERTS) / sum(kernel[:, e] * u) for e in range(EXPERTS)])
        u = np.array([1.0 / sum(kernel[t] * v) for t in range(12)])
    assert_close(plan_of(cost, 7)[0], u[:, None] * kernel * v[None, :], "matmul")


def test_large_entropy_gives_a_uniform_plan():
    plan = plan_of(costs(3) / 1e6, 5)
    assert_close(plan, np.full(plan.shape, 1.0 / EXPERTS), "matmul")


@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_plan_is_invariant_under_constants_of_an_expert(iterations):
    """At every iteration; those of a token only at convergence."""
    cost = costs(4)
    of_expert = jnp.array([3.0, -2.0, 0.5, 10.0])[None, None, :]
    plan = plan_of(cost, iterations)
    assert_close(plan_of(cost + of_expert, iterations), plan, "matmul")
    of_token = jnp.asarray(np.random.default_rng(5).normal(size=(2, 64, 1)), jnp.float32)
    error = np.abs(plan_of(cost + of_token, iterations) - plan).max()
    assert error < 1e-4 if iterations == 20 else error > 1e-4


def test_costs_of_any_size_give_finite_plans():
    """And groups of padding alone."""
    for size in (0.0, 1e-30, 1e4, 1e30):
        assert np.isfinite(plan_of(size * costs(6), 20)).all()
    mask = np.ones((2, 64), bool)
    mask[1] = False
    plan = plan_of(costs(6), 20, mask)
    assert np.isfinite(plan).all()
    assert_close(plan[0], plan_of(costs(6), 20)[0], "elementwise")


def test_no_gradient_passes_through_the_scalings():
    x = costs(7, groups=1)[0]

    def loss(cost):
        inputs = inputs_of(jnp.zeros((64, WIDTH)), extent=Extent())
        return jnp.sum(scalings(cost, inputs, scope="sequence", iterations=3) * x)

    assert (np.asarray(jax.jit(jax.grad(loss))(x)) == 0.0).all()


# Sinkhorn.


@pytest.mark.parametrize("top_k", [1, 2])
def test_sinkhorn_chooses_by_the_plan_and_weighs_by_the_logits(top_k):
    """Sigmoid for one expert, softmax over all for more; evaluation is plain."""
    router, params = build(SinkhornConfig(iterations=30), top_k)
    params, x = leaning(params), uneven(8)
    trained, evaluated = (route(router, params, x, train=train) for train in (True, False))
    logits = np.asarray(trained.logits)
    score = jax.nn.sigmoid if top_k == 1 else lambda z: jax.nn.softmax(z, axis=-1)
    plans = plan_of(jnp.asarray(logits.reshape(ROWS, LENGTH, EXPERTS)), 30).reshape(TOKENS, EXPERTS)
    for output, wanted in ((trained, plans), (evaluated, logits)):
        ids, scores = by_token(output)
        assert ids.tolist() == np.argsort(-wanted, axis=1)[:, :top_k].tolist()
        weights = np.take_along_axis(np.asarray(score(trained.logits)), ids, 1)
        assert_close(np.exp(scores), weights, "elementwise")
    assert trained.statistics.counts.max() < evaluated.statistics.counts.max()


# Selective Sinkhorn.


@pytest.mark.parametrize(("top_k", "order"), [(1, "before"), (2, "after"), (EXPERTS, "after")])
@pytest.mark.parametrize("train", [False, True])
def test_probability_0_is_plain_top_k_bit_for_bit(top_k, order, train):
    """In value and gradient, also in training steps without the plan."""
    plain, params = build(SoftmaxTopKConfig(softmax=order), top_k)
    never, _ = build(SelectiveSinkhornConfig(probability=0.0), top_k)
    seldom, _ = build(SelectiveSinkhornConfig(probability=1e-6), top_k)
    x = uneven(9)
    cotangent = drawn(10, tokens=TOKENS, width=top_k).reshape(-1)

    def loss(params, router):
        output = route(router, params, x, train=train)
        return jnp.sum(
            SoftmaxGateConfig()(output.selection, output.selection.scores) * cotangent
        ), output

    gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    wanted = gradient(params, plain)
    for router in (never, seldom):
        jax.tree.map(np.testing.assert_array_equal, gradient(params, router), wanted)


def test_share_of_even_steps_is_the_probability():
    """The share of even steps over 2000 keys is within 4 standard errors; all tokens agree."""
    router, params = build(SelectiveSinkhornConfig(probability=0.2))
    params, x = leaning(params), uneven(11)
    always = build(dataclasses.replace(router.config, probability=1.0))[0]
    even, plain = route(always, params, x, train=True), route(router, params, x)
    assert even.selection.expert_ids.tolist() != plain.selection.expert_ids.tolist()

    def once(key):
        return router.route(params, {}, inputs_of(x), train=True, key=key).selection.scores

    scores = jax.jit(lambda keys: jax.lax.map(once, keys))(
        jax.random.split(jax.random.key(0), 2000)
    )
    is_even, is_plain = (
        np.abs(np.asarray(scores) - np.asarray(output.selection.scores)).max(1) < 1e-5
        for output in (even, plain)
    )
    assert (is_even ^ is_plain).all()
    assert abs(is_even.mean() - 0.2) < 4 * np.sqrt(0.2 * 0.8 / 2000)


@pytest.mark.parametrize("cost", ["logits", "probs"])
def test_gates_are_shares_of_the_plan(cost):
    config = dataclasses.replace(ALWAYS, cost=cost, entropy=0.2, iterations=9)
    router, params = build(config)
    output = route(router, leaning(params), uneven(12), train=True)
    logits = output.logits.reshape(ROWS, LENGTH, EXPERTS)
    costs = logits if cost == "logits" else jax.nn.softmax(logits, axis=-1)
    plan = plan_of(costs / 0.2, 9).reshape(TOKENS, EXPERTS)
    ids, scores = by_token(output)
    shares = np.take_along_axis(plan, ids, 1)
    assert_close(np.exp(scores), shares / shares.sum(-1, keepdims=True), "matmul")


def test_the_gradient_is_that_of_the_kernel_with_constant_scalings():
    router, params = build(dataclasses.replace(ALWAYS, entropy=0.5))
    x = uneven(13)
    shifts = scalings(
        route(router, params, x).logits / 0.5, inputs_of(x), scope="sequence", iterations=20
    )
    cotangent = drawn(14, tokens=TOKENS, width=2)

    def ours(params):
        scores = route(router, params, x, train=True).selection.scores
        return jnp.sum(jnp.exp(scores).reshape(TOKENS, 2) * cotangent)

    def plain(params):
        log_plan = jnp.einsum("td,de->te", x, params["weight"]) / 0.5 + shifts
        chosen = jax.lax.top_k(log_plan, 2)[0]
        return jnp.sum(jax.nn.softmax(chosen, axis=-1) * cotangent)

    wanted = jax.jit(jax.grad(plain))(params)
    assert np.abs(wanted["weight"]).max() > 0.1
    assert_close(jax.jit(jax.grad(ours))(params), wanted, "matmul")


# BASE.


def plain_assignment(logits, capacity, top_k):
    """Take pairs in the order of decreasing logit while both sides have capacity."""
    taken = np.zeros(logits.shape, bool)
    for pair in np.argsort(-logits, axis=None, kind="stable"):
        token, expert = np.unravel_index(pair, logits.shape)
        if taken[token].sum() < top_k and taken[:, expert].sum() < capacity:
            taken[token, expert] = True
    return taken


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("tokens", [32, 27])
def test_base_is_the_greedy_assignment(top_k, tokens):
    logits = costs(15, tokens=tokens, groups=3)
    mask = np.ones((3, tokens), bool)
    mask[1, ::3] = False
    index = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (3, tokens))
    is_open = np.asarray(assign(logits, jnp.asarray(mask), index, top_k=top_k))
    for group in range(3):
        rows = np.asarray(logits[group])[mask[group]]
        capacity = -(-len(rows) * top_k // EXPERTS)
        wanted = plain_assignment(rows, capacity, top_k)
        assert not is_open[group][~mask[group]].any()
        left = np.where(is_open[group][mask[group]], rows, -np.inf)
        best = np.argsort(-left, axis=1)[:, :top_k]
        ours = np.zeros_like(wanted)
        np.put_along_axis(ours, best, True, axis=1)
        assert ((ours & np.isfinite(left)) == wanted).all()


@pytest.mark.parametrize("lean", [0.0, 2.0, 100.0])
def test_base_capacity_is_exact(lean):
    """S / E tokens to each expert in each row, and one expert to each token, however uneven the
    logits; with padding no expert exceeds its share of what is left. In evaluation they may."""
    router, params = build(BaseLayerConfig(), top_k=1)
    params, x = leaning(params, lean), uneven(16)
    output = route(router, params, x, train=True)
    ids, scores = by_token(output)
    for row in ids.reshape(ROWS, LENGTH):
        assert np.bincount(row, minlength=EXPERTS).tolist() == [LENGTH // EXPERTS] * EXPERTS
    logits = np.asarray(output.logits)
    weights = 1.0 / (1.0 + np.exp(-np.take_along_axis(logits, ids, 1)))
    assert_close(np.exp(scores), weights, "elementwise")
    mask = np.tile(np.arange(LENGTH) != 2, ROWS)
    masked = by_token(route(router, params, x, mask=mask, train=True))[0].reshape(ROWS, LENGTH)
    assert (masked[:, 2] == EXPERTS).all() and (np.delete(masked, 2, axis=1) < EXPERTS).all()
    for row in masked:
        assert np.bincount(row, minlength=EXPERTS)[:EXPERTS].max() <= -(-7 // EXPERTS)
    evaluated = route(router, params, x)
    assert by_token(evaluated)[0].ravel().tolist() == logits.argmax(1).tolist()
    if lean:
        assert evaluated.statistics.counts.max() > TOKENS // EXPERTS


def test_base_top_2_keeps_capacity_and_distinct_experts():
    router, params = build(BaseLayerConfig())
    ids, scores = by_token(route(router, leaning(params), uneven(17), train=True))
    for row in ids.reshape(ROWS, -1):
        assert np.bincount(row, minlength=EXPERTS)[:EXPERTS].max() <= 2 * LENGTH // EXPERTS
    is_empty = ids == EXPERTS
    assert np.isneginf(scores[is_empty]).all() and is_empty.mean() < 0.25
    assert all(len(set(row[row < EXPERTS])) == (row < EXPERTS).sum() for row in ids)


def test_base_equal_tokens_fill_experts_in_order():
    """The first tokens to the first expert, until it is full."""
    router, params = build(BaseLayerConfig(), top_k=1)
    ids, _ = by_token(route(router, params, jnp.zeros((TOKENS, WIDTH)), train=True))
    assert ids.ravel().tolist() == [t % LENGTH // 2 for t in range(TOKENS)]


# All of them.


@pytest.mark.parametrize("name", ["sinkhorn", "selective_sinkhorn", "base_layer"])
@pytest.mark.parametrize("scope", [pytest.param("sequence", marks=pytest.mark.large), "batch"])
def test_eight_devices_equal_one(name, scope):
    """Rows over data and expert, positions over seq; without its collectives each device would
    even its own tokens, which is another result, as is the other scope. The scope of a sequence is
    in the contract of every router too."""
    router, params = build(dataclasses.replace(EVENED[name], scope=scope), top_k=1)
    params, x, mask = leaning(params), uneven(18), np.arange(TOKENS) % 7 != 3
    ids, scores = by_token(route(router, params, x, mask=mask, train=True))
    spread_ids, spread_scores = route_on_eight_devices(router, params, x, mask=mask)
    assert spread_ids.tolist() == ids.tolist()
    assert_close(np.exp(spread_scores), np.exp(scores), "matmul")
    extents = {"sequence": Extent(sequence_length=LENGTH // 2), "batch": Extent()}
    other = route(router, params, x, mask=mask, train=True, extent=extents[scope])
    assert (by_token(other)[0].tolist() == ids.tolist()) == (scope == "batch")
    if scope == "batch":
        rows = build(EVENED[name], top_k=1)[0]
        other = route(rows, params, x, mask=mask, train=True)
        assert by_token(other)[0].tolist() != ids.tolist()


@every_evened
def test_sequences_are_independent(name):
    router, params = build(EVENED[name])
    params, x = leaning(params), uneven(19)
    whole = by_token(route(router, params, x, train=True))
    changed = by_token(route(router, params, x.at[LENGTH:].multiply(-3.0), train=True))
    for ours, theirs in zip(whole, changed, strict=True):
        np.testing.assert_array_equal(ours[:LENGTH], theirs[:LENGTH])
        assert (ours[LENGTH:] != theirs[LENGTH:]).any()


@every_evened
@pytest.mark.parametrize("balancer", [LoadBalanceConfig(), ImportanceVariationConfig()])
def test_a_balance_loss_is_refused_and_capacity_is_not(name, balancer):
    config = EVENED[name]
    text = (
        f"moe.balancers={balancer.name}: the router {config.name} evens the load by itself, and the"
        " loss would pull against it: leave it out of moe.balancers"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MoEConfig(router=config, gate=SoftmaxGateConfig(), balancers=(balancer, RouterZConfig()))
    MoEConfig(
        router=config,
        gate=SoftmaxGateConfig(),
        balancers=(RouterZConfig(),),
        capacity=CapacityConfig(),
    )


def test_selective_sinkhorn_refuses_other_gates():
    with pytest.raises(ValueError, match="^moe.router=selective_sinkhorn defines its own gates"):
        MoEConfig(router=ALWAYS, gate=RenormalizedGateConfig(), balancers=())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"iterations": 0}, "router.iterations=0 must be at least 1"),
        ({"probability": 1.5}, "router.probability=1.5 must lie between 0 and 1"),
        ({"entropy": 0.0}, "router.entropy=0.0 must be finite and above 0"),
    ],
)
def test_fields_are_checked(change, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SelectiveSinkhornConfig(**change)


def test_the_plan_needs_a_key():
    router, params = build(ALWAYS)
    with pytest.raises(ValueError, match="^this router draws random numbers in training"):
        router.route(params, {}, inputs_of(uneven(0)), train=True, key=None)
