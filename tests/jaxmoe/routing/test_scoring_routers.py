# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers by score: sigmoid, sqrt-softplus, noisy top-k, GShard, X-MoE; groups, scale and jitter.

Against loops over tokens and experts in numpy, and by the property that defines each.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import ndtr

from jaxmoe import MoEConfig
from jaxmoe.routing import (
    CosineTopKConfig,
    GShardConfig,
    ImportanceVariationConfig,
    LoadVariationConfig,
    LossFreeConfig,
    NoisyTopKConfig,
    RenormalizedGateConfig,
    SigmoidTopKConfig,
    SoftmaxGateConfig,
    SoftmaxTopKConfig,
    SparseMixerConfig,
    SqrtSoftplusTopKConfig,
)
from jaxmoe.routing.balancers import squared_variation
from jaxmoe.routing.routers.token_choice.groups import GroupLimitConfig
from tests.support.routing_inputs import (
    TOKENS,
    WIDTH,
    by_token,
    drawn,
    inputs_of,
    route,
    route_on_eight_devices,
)
from tests.support.tolerances import assert_close

EXPERTS = 8
SCORERS = {
    "softmax": (SoftmaxTopKConfig, lambda z: np.exp(z) / np.exp(z).sum()),
    "sigmoid": (SigmoidTopKConfig, lambda z: 1.0 / (1.0 + np.exp(-z))),
    "sqrt_softplus": (SqrtSoftplusTopKConfig, lambda z: np.sqrt(np.log1p(np.exp(z)))),
}
own_scores = pytest.mark.parametrize("name", ["sigmoid", "sqrt_softplus"])


def build(config, top_k=2):
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    return router, router.init(jax.random.key(0))[0]


# Loops.


def plain_choice(scores, bias, top_k, groups=None):
    """Ids of one token's experts, best first; ties to the lower."""
    wanted = scores + bias
    if groups is not None:
        size = len(scores) // groups.num_groups
        best = groups.best_per_group or max(1, top_k // groups.top_groups)
        of_group = [
            sum(sorted(wanted[g * size : (g + 1) * size])[-best:]) for g in range(groups.num_groups)
        ]
        kept = sorted(range(groups.num_groups), key=lambda g: -of_group[g])[: groups.top_groups]
        wanted = [v if e // size in kept else -np.inf for e, v in enumerate(wanted)]
    return sorted(range(len(scores)), key=lambda e: -wanted[e])[:top_k]


def plain_gates(logits, chosen, score, scale):
    """[T K]: scale * s_i / sum of s over the chosen."""
    gates = np.zeros(chosen.shape)
    for token, ids in enumerate(chosen):
        scores = score(logits[token])
        for slot, expert in enumerate(ids):
            gates[token, slot] = scale * scores[expert] / sum(scores[e] for e in ids)
    return gates


@own_scores
@pytest.mark.parametrize("groups", [None, GroupLimitConfig(num_groups=4, top_groups=2)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scores_against_loops_in_value_and_gradient(name, groups, has_bias):
    """The gradient of the gates in the logits, by differences in f64 with the choice held."""
    config, score = SCORERS[name]
    bias = LossFreeConfig() if has_bias else None
    router, params = build(config(bias=bias, groups=groups), top_k=4)
    x = drawn(0, 2.0)
    offset = np.random.default_rng(1).normal(size=EXPERTS) * 0.3 * has_bias
    state = {"bias": jnp.asarray(offset, jnp.float32)} if has_bias else {}
    gate = RenormalizedGateConfig(scale=2.5)
    cotangent = np.random.default_rng(2).normal(size=(TOKENS, 4))

    def loss(params):
        output = route(router, params, x, state=state)
        gates = gate(output.selection, output.selection.scores).reshape(TOKENS, 4)
        return jnp.sum(gates * jnp.asarray(cotangent, jnp.float32)), (gates, output)

    gradient, (gates, output) = jax.jit(jax.grad(loss, has_aux=True))(params)
    logits = np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64)
    chosen = np.array([plain_choice(score(z), offset, 4, groups) for z in logits])
    assert by_token(output)[0].tolist() == chosen.tolist()
    assert_close(gates, plain_gates(logits, chosen, score, 2.5), "matmul")
    all_scores = np.array([score(z) for z in logits])
    assert_close(output.probs, all_scores / all_scores.sum(-1, keepdims=True), "matmul")

    def plain_loss(weight):
        moved = np.asarray(x, np.float64) @ weight
        return np.sum(cotangent * plain_gates(moved, chosen, score, 2.5))

    weight, step = np.asarray(params["weight"], np.float64), 1e-6
    slope = np.zeros_like(weight)
    for place in np.ndindex(weight.shape):
        change = np.zeros_like(weight)
        change[place] = step
        slope[place] = (plain_loss(weight + change) - plain_loss(weight - change)) / (2 * step)
    assert_close(gradient["weight"], slope, "matmul")


@own_scores
def test_scores_are_finite_in_value_and_slope_everywhere(name):
    config, _ = SCORERS[name]
    router, _ = build(config(), top_k=1)
    x = jnp.ones((1, WIDTH))

    @jax.jit
    @jax.value_and_grad
    def score(weight):
        return route(router, {"weight": weight}, x).selection.scores[0]

    for z in (-1e4, -200.0, -14.0, 0.0, 14.0, 1e4):
        value, slope = score(jnp.full((WIDTH, EXPERTS), z / WIDTH))
        assert np.isfinite(value) and np.isfinite(slope).all()
        if z <= -200.0:  # far below 0 both are exponentials, of z and of z / 2
            assert value == pytest.approx(z if name == "sigmoid" else z / 2, rel=1e-6)


# Catalogue 1.


@pytest.mark.parametrize("name", SCORERS)
def test_renormalized_gates_are_the_softmax_over_the_chosen(name):
    """Renormalized gates are the softmax over the chosen of the log scores; of softmax scores, of
    the logits. They sum to the scale."""
    router, params = build(SCORERS[name][0](), top_k=3)
    x = drawn(3)
    output = route(router, params, x)
    ids, log_scores = by_token(output)
    gate = RenormalizedGateConfig(scale=2.5)
    gates = gate(output.selection, output.selection.scores).reshape(TOKENS, 3)
    source = np.take_along_axis(np.asarray(output.logits), ids, 1)
    wanted = jax.nn.softmax(jnp.asarray(source if name == "softmax" else log_scores), axis=-1)
    assert_close(gates, 2.5 * wanted, "elementwise")
    assert_close(gates.sum(-1), np.full(TOKENS, 2.5), "elementwise")
    if name == "softmax":
        after, _ = build(SoftmaxTopKConfig(softmax="after"), top_k=3)
        selection = route(after, params, x).selection
        scaled = SoftmaxGateConfig(scale=2.5)(selection, selection.scores)
        assert_close(scaled.reshape(TOKENS, 3), gates, "elementwise")


@pytest.mark.parametrize("gate", [SoftmaxGateConfig, RenormalizedGateConfig])
def test_scale_multiplies_every_gate_and_nothing_else(gate):
    router, params = build(SigmoidTopKConfig())
    output = route(router, params, drawn(4), mask=np.arange(TOKENS) % 3 != 0)
    plain, scaled = (g(output.selection, output.selection.scores) for g in (gate(), gate(scale=16)))
    assert_close(scaled, 16.0 * plain, "elementwise")
    assert (np.asarray(scaled).reshape(TOKENS, 2)[::3] == 0.0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_bad_scale_is_refused(scale):
    text = f"gate.scale={scale} must be finite and above 0; 1 leaves the gates alone"
    for gate in (SoftmaxGateConfig, RenormalizedGateConfig):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            gate(scale=scale)


def test_one_expert_renormalized_is_the_scale_and_by_score_it_is_not():
    """DeepSeek's K = 1 is the gate softmax with a scale."""
    router, params = build(SigmoidTopKConfig(), top_k=1)
    output = route(router, params, drawn(5))
    scores = output.selection.scores
    gates = RenormalizedGateConfig(scale=2.5)(output.selection, scores)
    assert_close(gates, np.full(TOKENS, 2.5), "elementwise")
    assert np.ptp(SoftmaxGateConfig(scale=2.5)(output.selection, scores)) > 0.1


# Catalogue 2.


@pytest.mark.parametrize("name", SCORERS)
def test_group_limit(name):
    """At most M groups in a token; all of them allowed is no limit."""
    config, _ = SCORERS[name]
    x = drawn(6)
    plain, params = build(config(), top_k=4)
    wanted = by_token(route(plain, params, x))[0]
    size, used = EXPERTS // 4, {}
    for top_groups in (2, 3, 4):
        limit = GroupLimitConfig(num_groups=4, top_groups=top_groups)
        ids = by_token(route(build(config(groups=limit), top_k=4)[0], params, x))[0]
        used[top_groups] = max(len(set((row // size).tolist())) for row in ids)
        assert used[top_groups] <= top_groups
        assert (ids == wanted).all() == (top_groups == 4)
    assert used[4] > 2  # or the limit was none


def test_a_group_is_scored_by_probabilities():
    """One expert of probability 0.96 outweighs two of 0.02; a bias of 0 has no effect."""
    limit = GroupLimitConfig(num_groups=2, top_groups=1, best_per_group=2)
    logits = jnp.asarray([[5.0, -10.0, 1.0, 1.0]])
    for bias in (None, LossFreeConfig()):
        router = SoftmaxTopKConfig(groups=limit, bias=bias).build(
            num_experts=4, top_k=2, embed_dim=4
        )
        state = router.init(jax.random.key(0))[1]
        output = route(router, {"weight": jnp.eye(4)}, logits, state=state)
        assert output.selection.expert_ids.tolist() == [0, 1]


# Jitter.


@pytest.mark.parametrize("name", SCORERS)
def test_jitter_is_the_same_on_every_mesh(name):
    """It applies in training only, with the configured width."""
    config, _ = SCORERS[name]
    router, params = build(config(jitter=0.1))
    x, calm = drawn(7), build(config())[0]
    shaken = route(router, params, x, train=True)
    ids, scores = by_token(shaken)
    spread_ids, spread_scores = route_on_eight_devices(router, params, x)
    assert spread_ids.tolist() == ids.tolist()
    assert_close(spread_scores, scores, "matmul")
    plain = route(calm, params, x)
    jax.tree.map(np.testing.assert_array_equal, route(router, params, x).logits, plain.logits)
    # |z' - z| <= 0.1 sum_d |x_d W_de|
    bound = 0.1 * np.abs(np.asarray(x)) @ np.abs(np.asarray(params["weight"]))
    moved = np.abs(np.asarray(shaken.logits) - np.asarray(plain.logits))
    assert (moved <= bound + 1e-5).all() and (moved > 0.3 * bound).any()


@pytest.mark.parametrize("config", [SigmoidTopKConfig, SqrtSoftplusTopKConfig])
def test_bad_jitter_is_refused(config):
    with pytest.raises(ValueError, match=r"^router.jitter=1.0 must be at least 0"):
        config(jitter=1.0)


# Noisy top-k.


def noisy_params(level, seed=8):
    """Logits as drawn; the width of the noise is softplus(level + something small)."""
    rng = np.random.default_rng(seed)
    weight, noise = (rng.normal(size=(WIDTH, EXPERTS)) for _ in range(2))
    weight[-1], noise = 0.0, 0.1 * noise
    noise[-1] = level  # the last feature is 1
    return {
        "weight": jnp.asarray(weight, jnp.float32),
        "noise": jnp.asarray(noise, jnp.float32),
    }


def with_one(x):
    return x.at[:, -1].set(1.0)


@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_noise_to_minus_infinity_is_deterministic(top_k):
    x, params = with_one(drawn(9)), noisy_params(-200.0)
    router = build(NoisyTopKConfig(), top_k)[0]
    blurred, sharp = (route(router, params, x, train=train) for train in (True, False))
    plain = route(build(SoftmaxTopKConfig(), top_k)[0], {"weight": params["weight"]}, x)
    for output in (blurred, sharp):
        assert_close(output.selection, plain.selection, "elementwise")
        assert_close(output.statistics.extra["smooth_load"], plain.statistics.counts, "elementwise")


def test_noise_is_drawn_in_training_only():
    x, params = with_one(drawn(10)), noisy_params(1.0)
    router = build(NoisyTopKConfig())[0]
    one, again, other = (
        route(router, params, x, train=True, key=jax.random.key(seed)) for seed in (0, 0, 1)
    )
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert (np.asarray(one.selection.expert_ids) != np.asarray(other.selection.expert_ids)).any()
    jax.tree.map(np.testing.assert_array_equal, one.logits, other.logits)


def plain_smooth_load(logits, noisy, sigma, top_k, mask):
    """The paper's load, by loops: P(x, i) with the k-th largest of the others."""
    load = np.zeros(EXPERTS)
    for token in np.flatnonzero(mask):
        for expert in range(EXPERTS):
            others = sorted(np.delete(noisy[token], expert))
            load[expert] += ndtr((logits[token, expert] - others[-top_k]) / sigma[token, expert])
    return load


@pytest.mark.parametrize("top_k", [1, 3])
def test_smooth_load_gradient_against_loops(top_k):
    """The smooth loads and the gradient of the load loss, against loops and differences in f64."""
    x, params = with_one(drawn(11)), noisy_params(0.3)
    router, mask = build(NoisyTopKConfig(), top_k)[0], np.arange(TOKENS) % 5 != 1
    balancer = LoadVariationConfig(coefficient=0.7)

    def loss(params):
        output = route(router, params, x, mask=mask, train=True)
        return balancer.loss(output.statistics), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))(params)
    weight, noise = (np.asarray(params[name], np.float64) for name in ("weight", "noise"))
    rows = np.asarray(x, np.float64)
    # The noise drawn: log_scores = h - logsumexp(h) up to a constant of the token.
    ids, _ = by_token(output)
    draws = np.asarray(
        jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(3), i), (EXPERTS,)))(
            jnp.arange(TOKENS)
        ),
        np.float64,
    )

    def plain(weight, noise):
        logits, sigma = rows @ weight, np.log1p(np.exp(rows @ noise))
        load = plain_smooth_load(logits, logits + sigma * draws, sigma, top_k, mask)
        return load, 0.7 * np.var(load) / np.mean(load) ** 2, logits + sigma * draws

    load, value, noisy = plain(weight, noise)
    order = np.argsort(-noisy, axis=1)[:, :top_k]
    assert ids[mask].tolist() == order[mask].tolist()
    assert_close(output.statistics.extra["smooth_load"], load, "matmul")
    assert_close(balancer.loss(output.statistics), value, "matmul")
    step = 1e-6
    for name, place in (
        ("weight", (0, 2)),
        ("weight", (3, 5)),
        ("noise", (1, 4)),
        ("noise", (4, 0)),
    ):
        change = np.zeros((WIDTH, EXPERTS))
        change[place] = step
        both = [
            plain(
                weight + sign * change * (name == "weight"),
                noise + sign * change * (name == "noise"),
            )[1]
            for sign in (1, -1)
        ]
        slope = (both[0] - both[1]) / (2 * step)
        assert abs(slope) > 1e-4
        assert_close(gradient[name][place], slope, "matmul")


def test_importance_is_the_sum_of_gates():
    router, params = build(SoftmaxTopKConfig(), top_k=3)
    x, mask = drawn(12), np.arange(TOKENS) % 4 != 2
    balancer = ImportanceVariationConfig(coefficient=0.5)

    def loss(params):
        output = route(router, params, x, mask=mask)
        seen = balancer.observe(output, inputs_of(x, mask=mask))
        return 0.5 * squared_variation(seen["importance"]), (seen, output)

    gradient, (seen, output) = jax.jit(jax.grad(loss, has_aux=True))(params)
    ids, log_scores = by_token(output)
    importance = np.zeros(EXPERTS)
    for token in np.flatnonzero(mask):
        gates = np.exp(np.float64(log_scores[token]))
        for expert, gate in zip(ids[token], gates / gates.sum(), strict=True):
            importance[expert] += gate
    assert_close(seen["importance"], importance, "elementwise")
    assert np.isfinite(gradient["weight"]).all() and np.abs(gradient["weight"]).max() > 1e-4


def test_squared_variation_of_even_and_of_collapsed_loads():
    even, one = jnp.full(EXPERTS, 3.0), jnp.zeros(EXPERTS).at[2].set(24.0)
    wanted = np.array([0.0, EXPERTS - 1.0])
    assert_close(squared_variation(jnp.stack([even, one])), wanted, "elementwise")


def test_the_load_loss_needs_smooth_loads():
    text = (
        "moe.balancers=load_variation needs the smooth loads of the router noisy_topk, and"
        " moe.router=softmax_topk has none: use importance_variation or load_balance"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MoEConfig(balancers=(LoadVariationConfig(),))
    losses = (ImportanceVariationConfig(), LoadVariationConfig())
    assert MoEConfig(router=NoisyTopKConfig(), balancers=losses).balancers == losses


# SparseMixer.


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.6])
def test_sparse_mixer_weighs_each_expert_among_those_close_behind_it(margin):
    """By loops, in double precision; with a margin of 0 every gate is 1."""
    router, params = build(SparseMixerConfig(margin=margin))
    x = drawn(14, 1.5, tokens=40)
    ids, scores = by_token(route(router, params, x))
    logits = np.asarray(route(router, params, x).logits, np.float64)
    for token, values in enumerate(logits):
        remaining = set(range(len(values)))
        for slot in range(2):
            best = max(remaining, key=lambda expert: values[expert])
            close = [
                j
                for j in remaining
                if values[best] - values[j] <= margin * max(abs(values[j]), values[best])
            ]
            gate = np.exp(values[best]) / sum(np.exp(values[j]) for j in close)
            assert ids[token, slot] == best
            np.testing.assert_allclose(np.exp(scores[token, slot]), gate, rtol=1e-5)
            remaining.remove(best)
    assert (np.exp(scores) > 0.999).all() == (margin == 0.0)


def test_sparse_mixer_refuses_a_negative_margin():
    with pytest.raises(ValueError, match="router.margin=-0.1 must be finite and at least 0"):
        SparseMixerConfig(margin=-0.1)


# GShard.


def test_gshard_keeps_the_second_expert_twice_as_often_as_its_gate():
    """Over many keys: never the first left out, the second used with probability min(1, 2 g_2),
    within 4 standard errors; gates as in evaluation, where both are used."""
    router, params = build(GShardConfig())
    x, draws = drawn(13, 1.5, tokens=8), 2000
    wanted_ids, wanted = by_token(route(router, params, x))
    assert_close(np.exp(wanted).sum(-1), np.ones(8), "elementwise")

    def once(key):
        selection = router.route(params, {}, inputs_of(x), train=True, key=key).selection
        return selection.expert_ids.reshape(8, 2), selection.scores.reshape(8, 2)

    ids, scores = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(0), draws))
    ids, scores = np.asarray(ids), np.asarray(scores)
    is_used = ids < EXPERTS
    assert is_used[:, :, 0].all()
    assert (np.where(is_used, ids, wanted_ids) == wanted_ids).all()
    assert_close(np.where(is_used, scores, wanted), np.broadcast_to(wanted, scores.shape), "matmul")
    assert np.isneginf(scores[~is_used]).all()
    chance = np.minimum(1.0, 2.0 * np.exp(wanted[:, 1]))
    error = np.sqrt(chance * (1.0 - chance) / draws)
    assert (np.abs(is_used[:, :, 1].mean(0) - chance) <= 4.0 * error + 1e-9).all()
    assert chance.min() < 0.5 < chance.max()


def test_gshard_refuses_other_top_k():
    text = (
        "top_k=1: the router gshard has a first and a second expert: set top_k to 2 or take another"
        " router"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        build(GShardConfig(), top_k=1)


# X-MoE.


@pytest.mark.parametrize("scale", [1e-20, 0.03, 40.0, 1e20])
def test_cosines_are_independent_of_the_norm_of_x(scale):
    router, params = build(CosineTopKConfig(router_dim=3))
    x = drawn(14)
    plain, scaled = (route(router, params, rows) for rows in (x, scale * x))
    assert_close(scaled.logits, plain.logits, "matmul")
    assert (by_token(scaled)[0] == by_token(plain)[0]).all()
    experts = {**params, "experts": scale * params["experts"]}
    assert_close(route(router, experts, x).logits, plain.logits, "matmul")
    # The slope along x itself is 0.
    slope = jax.jit(jax.grad(lambda rows: route(router, params, rows).logits[:, 0].sum()))(x)
    assert_close(jnp.sum(slope * x, axis=1), np.zeros(TOKENS), "matmul")


def test_cosines_against_numpy_and_the_bound_of_the_temperature():
    router, params = build(CosineTopKConfig(router_dim=3, temperature=0.2))
    x = drawn(15)
    low = np.asarray(x, np.float64) @ np.asarray(params["projection"], np.float64)
    experts = np.asarray(params["experts"], np.float64)
    low /= np.linalg.norm(low, axis=1, keepdims=True)
    cosine = low @ (experts / np.linalg.norm(experts, axis=0))
    for log_scale, inverse in ((0.0, 5.0), (np.log(3.0), 15.0), (50.0, 100.0)):
        moved = {**params, "log_scale": jnp.full((1,), log_scale, jnp.float32)}
        assert_close(route(router, moved, x).logits, inverse * cosine, "matmul")
    slope = jax.jit(jax.grad(lambda rows: route(router, params, rows).logits.sum()))
    assert np.isfinite(slope(jnp.zeros_like(x))).all()


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("router_dim", 0, "router.router_dim=0 must be at least 1, or None for E / 2"),
        ("temperature", 0.0, "router.temperature=0.0 must be finite and at least 0.01"),
    ],
)
def test_cosine_fields_are_checked(field, value, text):
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        CosineTopKConfig(**{field: value})
