# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""What every router promises, whatever it computes; then what softmax top-k promises beyond.

A router that is in the registry and not in ROUTER_CASES fails the first test, and so cannot skip
the others. To add a router: its configs in ROUTER_CASES.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmoe.routing import GATES, METHODS, ROUTERS, RouterInputs, SoftmaxTopKConfig
from tests.support.dense_moe import choose
from tests.support.tolerances import assert_close

ROUTER_CASES = {
    "softmax_topk": (SoftmaxTopKConfig(softmax="before"), SoftmaxTopKConfig(softmax="after")),
}

TOKENS, WIDTH, EXPERTS = 8, 5, 6
CASES = [
    pytest.param(config, top_k, id=f"{name}-{index}-top{top_k}")
    for name, configs in ROUTER_CASES.items()
    for index, config in enumerate(configs)
    for top_k in (1, 2, EXPERTS)
]
every_router = pytest.mark.parametrize(("config", "top_k"), CASES)


def test_the_table_is_the_registry():
    assert set(ROUTER_CASES) == set(ROUTERS)
    for name, configs in ROUTER_CASES.items():
        assert {type(config) for config in configs} == {ROUTERS[name]}


@functools.cache
def routing(config, top_k):
    """`(params, x, token_mask=None) -> (RouterOutput, {gate: gates [A]})`, jitted."""
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    state = router.init(jax.random.key(0))[1]

    @jax.jit
    def run(params, x, token_mask=None):
        inputs = RouterInputs(
            x=x,
            token_mask=jnp.ones(x.shape[0], bool) if token_mask is None else token_mask,
            segment_ids=jnp.ones(x.shape[0], jnp.int32),
        )
        output = router.route(params, state, inputs, train=False, key=None)
        selection = output.selection
        return output, {name: GATES[name]()(selection, selection.scores) for name in GATES}

    return run


def route(config, top_k, params, x, token_mask=None):
    return routing(config, top_k)(params, x, token_mask)[0]


@functools.cache
def initial(config, top_k, seed=0):
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    return router.init(jax.random.key(seed))[0]


def drawn(seed, scale=1.0, tokens=TOKENS):
    values = np.random.default_rng(seed).normal(size=(tokens, WIDTH)) * scale
    return jnp.asarray(values, jnp.float32)


def by_token(flat, top_k):
    return np.asarray(flat).reshape(-1, top_k)


@every_router
@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), scale=st.sampled_from([0.0, 1e-4, 1.0, 30.0, 1e4]))
def test_the_records_hold_what_they_say(config, top_k, seed, scale):
    x = drawn(seed, scale)
    output, all_gates = routing(config, top_k)(initial(config, top_k), x)
    selection, statistics = output.selection, output.statistics
    ids = by_token(selection.expert_ids, top_k)
    assert ids.dtype == np.int32 and ids.shape[0] == TOKENS
    assert ((ids >= 0) & (ids < EXPERTS)).all()
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert selection.token_ids.tolist() == np.repeat(np.arange(TOKENS), top_k).tolist()
    assert selection.scores.dtype == output.logits.dtype == output.probs.dtype == jnp.float32
    assert np.isfinite(selection.scores).all() and (np.asarray(selection.scores) <= 1e-6).all()
    assert_close(output.probs.sum(-1), np.ones(TOKENS), "elementwise")
    for gates in all_gates.values():
        assert gates.dtype == jnp.float32 and np.isfinite(gates).all() and (gates >= 0).all()
    # The statistics are sums over tokens of what the records show of each.
    counts = np.bincount(ids.ravel(), minlength=EXPERTS)
    assert statistics.counts.tolist() == statistics.kept.tolist() == counts.tolist()
    assert statistics.num_tokens == TOKENS
    probs, logits = (np.asarray(array, np.float64) for array in (output.probs, output.logits))
    assert_close(statistics.prob_sum, probs.sum(0), "matmul")
    z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    assert_close(statistics.z_sum, (z**2).sum(), "matmul")
    entropy = -(probs * np.log(np.maximum(probs, 1e-300))).sum()
    assert_close(statistics.entropy_sum, entropy, "matmul")


@every_router
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(config, top_k, tokens):
    output = route(config, top_k, initial(config, top_k), drawn(1, tokens=tokens))
    assert output.selection.expert_ids.shape == (tokens * top_k,)
    assert output.statistics.counts.sum() == tokens * top_k
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(output.statistics))


@every_router
def test_padding_goes_nowhere_and_is_counted_nowhere(config, top_k):
    run, params, x = routing(config, top_k), initial(config, top_k), drawn(2)
    mask = np.arange(TOKENS) % 3 != 1
    output, all_gates = run(params, x, mask)
    ids, scores = (
        by_token(flat, top_k) for flat in (output.selection.expert_ids, output.selection.scores)
    )
    assert (ids[~mask] == EXPERTS).all() and np.isneginf(scores[~mask]).all()
    compact, _ = run(params, x[mask])
    assert ids[mask].tolist() == by_token(compact.selection.expert_ids, top_k).tolist()
    assert_close(output.statistics, compact.statistics, "elementwise")
    # What stands in the padding is of no consequence, even where its squares overflow.
    strange = jnp.where(mask[:, None], x, 1e30)
    assert_close(run(params, strange, mask)[0].statistics, output.statistics, "elementwise")
    for gates in all_gates.values():
        gates = by_token(gates, top_k)
        assert (gates[~mask] == 0.0).all() and (gates[mask] > 0.0).all()


@every_router
def test_ties_go_to_the_lower_expert(config, top_k):
    output = route(config, top_k, initial(config, top_k), jnp.zeros((TOKENS, WIDTH)))
    assert by_token(output.selection.expert_ids, top_k).tolist() == [list(range(top_k))] * TOKENS


@every_router
def test_permuting_tokens_permutes_the_result(config, top_k):
    params, x = initial(config, top_k), drawn(3)
    order = np.random.default_rng(0).permutation(TOKENS)
    plain, permuted = (route(config, top_k, params, rows) for rows in (x, x[order]))
    for name in ("expert_ids", "scores"):
        wanted = by_token(getattr(plain.selection, name), top_k)[order]
        assert_close(by_token(getattr(permuted.selection, name), top_k), wanted, "elementwise")
    assert_close(permuted.statistics, plain.statistics, "elementwise")


@every_router
def test_permuting_experts_permutes_the_ids(config, top_k):
    params, x = initial(config, top_k), drawn(4)
    order = np.random.default_rng(1).permutation(EXPERTS)
    moved = {"weight": params["weight"][:, order]}
    plain, permuted = (route(config, top_k, weights, x) for weights in (params, moved))
    assert order[permuted.selection.expert_ids].tolist() == plain.selection.expert_ids.tolist()
    assert_close(permuted.selection.scores, plain.selection.scores, "elementwise")
    assert_close(permuted.statistics.counts, plain.statistics.counts[order], "elementwise")


@every_router
def test_statistics_of_two_halves_add_up(config, top_k):
    params, x, half = initial(config, top_k), drawn(5), TOKENS // 2
    parts = [route(config, top_k, params, rows).statistics for rows in (x[:half], x[half:], x)]
    assert_close(parts[0] + parts[1], parts[2], "elementwise")


@every_router
def test_narrow_inputs_are_widened_first(config, top_k):
    params, narrow = initial(config, top_k), drawn(6).astype(jnp.bfloat16)
    wide = route(config, top_k, params, narrow.astype(jnp.float32))
    assert_close(route(config, top_k, params, narrow), wide, "elementwise")


@every_router
def test_all_tokens_to_one_expert(config, top_k):
    """The load is as uneven as it can be, the logits are large, and nothing breaks."""
    weight = jnp.zeros((WIDTH, EXPERTS)).at[0, 3].set(1e4)
    x = jnp.ones((TOKENS, WIDTH))

    def loss(params):
        output, gates = routing(config, top_k)(params, x)
        return sum(jax.tree.map(jnp.sum, gates).values()) + output.statistics.prob_sum[3], output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True))({"weight": weight})
    assert output.statistics.counts[3] == TOKENS
    assert output.selection.expert_ids[::top_k].tolist() == [3] * TOKENS
    assert np.isfinite(gradient["weight"]).all()


@every_router
@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_reaches_the_router(config, top_k, gate):
    """With one expert chosen, a score that sums to 1 over the chosen is the constant 1: the
    language-model loss teaches such a router nothing, and only the balance losses move it."""
    x, params = drawn(7), initial(config, top_k)
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=TOKENS * top_k), jnp.float32)

    def loss(params):
        output, gates = routing(config, top_k)(params, x)
        return jnp.sum(cotangent * gates[gate]), output.statistics.prob_sum[0]

    gradient, balance = (np.asarray(row["weight"]) for row in jax.jit(jax.jacrev(loss))(params))
    is_constant = top_k == 1 and (gate != "softmax" or config.softmax == "after")
    assert np.isfinite(gradient).all() and np.isfinite(balance).all()
    assert (np.abs(gradient).max() == 0.0) == is_constant
    assert np.abs(balance).max() > 0.0


@every_router
def test_declarations_and_initial_values_agree(config, top_k):
    router = config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)
    params, state = router.init(jax.random.key(0))
    declared = {name: row.shape for name, row in router.declarations().items()}
    assert declared == {name: value.shape for name, value in params.items()}
    statistics = route(config, top_k, params, drawn(8)).statistics
    after = router.update(state, statistics, jnp.int32(0))
    assert jax.tree.structure(after) == jax.tree.structure(state)


# Softmax top-k.


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
def test_renormalizing_before_is_after(top_k):
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
def test_more_experts_than_there_are_is_refused(top_k):
    text = f"top_k={top_k} must lie between 1 and num_experts={EXPERTS}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        SoftmaxTopKConfig().build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_made_of_registered_parts(name):
    parts = METHODS[name].parts()
    assert ROUTERS[parts["router"].name] is type(parts["router"])
    assert GATES[parts["gate"].name] is type(parts["gate"])
    assert METHODS[name].source.startswith("arXiv ")
