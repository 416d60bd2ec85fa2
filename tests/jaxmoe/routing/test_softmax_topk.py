# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What softmax top-k promises beyond the contract of every router, and its gates with it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.routing import GATES, ROUTERS, RouterInputs, SoftmaxTopKConfig
from jaxmoe.routing.routers.token_choice.topk import LogitBiasConfig
from tests.support.dense_moe import choose
from tests.support.tolerances import assert_close

TOKENS, WIDTH, EXPERTS = 8, 5, 6


@functools.cache
def routing(config, top_k):
    """`(params, x) -> (RouterOutput, {gate: gates [A]})`, jitted."""
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    state = router.init(jax.random.key(0))[1]

    @jax.jit
    def run(params, x):
        inputs = RouterInputs(
            x=x,
            token_mask=jnp.ones(x.shape[0], bool),
            segment_ids=jnp.ones(x.shape[0], jnp.int32),
        )
        output = router.route(params, state, inputs, train=False, key=None)
        selection = output.selection
        return output, {name: GATES[name]()(selection, selection.scores) for name in GATES}

    return run


def route(config, top_k, params, x):
    return routing(config, top_k)(params, x)[0]


def drawn(seed, scale=1.0, tokens=TOKENS):
    values = np.random.default_rng(seed).normal(size=(tokens, WIDTH)) * scale
    return jnp.asarray(values, jnp.float32)


def by_token(flat, top_k):
    return np.asarray(flat).reshape(-1, top_k)


@pytest.mark.parametrize("name", ["softmax_topk", "sigmoid_topk", "sqrt_softplus_topk"])
def test_a_bias_of_the_logits_acts_on_choice_and_scores(name):
    """As a further input that is always 1, in value and gradient."""
    x, bias = drawn(7), jnp.asarray([1.0, -2.0, 0.5, 0.0, 3.0, -0.5], jnp.float32)
    config, params = (
        ROUTERS[name](logit_bias=LogitBiasConfig()),
        {"weight": wide_weight()["weight"], "bias": bias},
    )
    wider = jnp.concatenate([x, jnp.ones((TOKENS, 1))], axis=1)
    matrix = {"weight": jnp.concatenate([params["weight"], bias[None]])}

    def scores(config, params, x):
        output = routing_of(config, x.shape[1], params, x)
        return jnp.sum(output.selection.scores), output

    (_, ours), slopes = jax.value_and_grad(scores, argnums=1, has_aux=True)(config, params, x)
    plain = ROUTERS[name]()
    (_, wanted), expected = jax.value_and_grad(scores, argnums=1, has_aux=True)(
        plain, matrix, wider
    )
    assert_close((ours.logits, ours.probs), (wanted.logits, wanted.probs), "matmul")
    assert_close(ours.selection, wanted.selection, "matmul")
    joined = jnp.concatenate([slopes["weight"], slopes["bias"][None]])
    assert_close(joined, expected["weight"], "matmul")
    without = routing_of(plain, WIDTH, {"weight": params["weight"]}, x)
    assert without.selection.expert_ids.tolist() != ours.selection.expert_ids.tolist()


def routing_of(config, width, params, x):
    router = config.build(num_experts=EXPERTS, top_k=2, embed_dim=width)
    inputs = RouterInputs(
        x=x, token_mask=jnp.ones(len(x), bool), segment_ids=jnp.ones(len(x), jnp.int32)
    )
    return router.route(params, {}, inputs, train=False, key=None)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_gradient_through_each_gate(order, top_k):
    """With one expert chosen, a score that sums to 1 over the chosen is the constant 1: the
    language-model loss teaches such a router nothing, and only the balance losses move it."""
    x, params, config = drawn(7), wide_weight(), SoftmaxTopKConfig(softmax=order)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=TOKENS * top_k), jnp.float32)

    def loss(params):
        output, gates = routing(config, top_k)(params, x)
        sums = {gate: jnp.sum(cotangent * gates[gate]) for gate in GATES}
        return sums, output.statistics.prob_sum[0]

    gradients, balance = jax.jit(jax.jacrev(loss))(params)
    assert np.isfinite(balance["weight"]).all() and np.abs(balance["weight"]).max() > 0.0
    for gate, gradient in gradients.items():
        is_constant = top_k == 1 and (gate != "softmax" or order == "after")
        assert np.isfinite(gradient["weight"]).all()
        assert (np.abs(gradient["weight"]).max() == 0.0) == is_constant, gate


def wide_weight(seed=9):
    values = np.random.default_rng(seed).normal(size=(WIDTH, EXPERTS))
    return {"weight": jnp.asarray(values, jnp.float32)}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_softmax_topk_against_loops(order, top_k):
    x, params = drawn(10), wide_weight()
    output = route(SoftmaxTopKConfig(softmax=order), top_k, params, x)
    logits = np.asarray(x, np.float64) @ np.asarray(params["weight"], np.float64)
    assert_close(output.logits, logits, "matmul")
    chosen = choose(np.asarray(output.logits), top_k, np.ones(TOKENS, bool))
    scores = np.exp(logits)
    scores /= (scores if order == "before" else scores * chosen).sum(-1, keepdims=True)
    ids = by_token(output.selection.expert_ids, top_k)
    for token in range(TOKENS):
        assert set(ids[token]) == set(np.flatnonzero(chosen[token]))
    wanted = np.take_along_axis(scores, ids, axis=-1)
    assert_close(np.exp(by_token(output.selection.scores, top_k)), wanted, "matmul")


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_renormalized_before_equals_after(top_k):
    """softmax over all experts, renormalized over the chosen, is softmax over the chosen."""
    x = drawn(11)
    cotangent = jnp.arange(TOKENS * top_k, dtype=jnp.float32) - 3.0

    def gates(params, order, gate):
        values = routing(SoftmaxTopKConfig(softmax=order), top_k)(params, x)[1][gate]
        return jnp.sum(values * cotangent), values

    gradient = jax.jit(jax.grad(gates, has_aux=True), static_argnums=(1, 2))
    both = [
        gradient(wide_weight(), *choice)
        for choice in (("before", "renormalized"), ("after", "softmax"))
    ]
    assert_close(*both, "matmul")


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_constant_added_to_a_tokens_logits_changes_nothing(order):
    """The last feature adds itself to every logit of its token."""
    params = {"weight": wide_weight()["weight"].at[-1].set(1.0)}
    x = drawn(12).at[:, -1].set(0.0)
    moved = x.at[:, -1].set(jnp.linspace(-4.0, 4.0, TOKENS))
    config = SoftmaxTopKConfig(softmax=order)
    plain, shifted = (route(config, 2, params, rows) for rows in (x, moved))
    assert shifted.selection.expert_ids.tolist() == plain.selection.expert_ids.tolist()
    assert_close(shifted.selection.scores, plain.selection.scores, "matmul")
    assert_close(shifted.probs, plain.probs, "matmul")


def test_after_gives_unchosen_experts_no_gradient_and_before_does():
    x = drawn(13, tokens=1)

    def sensitivity(order):
        def first_gate(params):
            output, gates = routing(SoftmaxTopKConfig(softmax=order), 2)(params, x)
            return gates["softmax"][0], output.selection.expert_ids

        gradient, ids = jax.jit(jax.grad(first_gate, has_aux=True))(wide_weight())
        return np.abs(np.delete(np.asarray(gradient["weight"]), ids, axis=1)).max()

    assert sensitivity("after") == 0.0
    assert sensitivity("before") > 1e-3


@pytest.mark.parametrize("top_k", [0, EXPERTS + 1])
def test_top_k_above_num_experts_is_refused(top_k):
    text = f"top_k={top_k} must lie between 1 and num_experts={EXPERTS}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SoftmaxTopKConfig().build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
