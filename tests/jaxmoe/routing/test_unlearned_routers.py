# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Routers without parameters: hash, uniform random, forced balance."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe import MoEConfig
from jaxmoe.routing import (
    ForcedBalanceConfig,
    HashConfig,
    RouterInputs,
    SoftmaxGateConfig,
    UniformRandomConfig,
)
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
CONFIGS = {
    config.name: config for config in (HashConfig(), UniformRandomConfig(), ForcedBalanceConfig())
}
every_control = pytest.mark.parametrize("name", CONFIGS)


def build(name, top_k=2, **changes):
    config = type(CONFIGS[name])(**changes)
    return config.build(num_experts=EXPERTS, top_k=top_k, embed_dim=WIDTH)


@every_control
@pytest.mark.parametrize(("top_k", "train"), [(1, True), (3, False), (3, True), (EXPERTS, False)])
def test_k_distinct_experts_of_equal_weight_whatever_x_is(name, top_k, train):
    router = build(name, top_k)
    assert router.declarations() == {} == router.init(jax.random.key(0))[0]
    output, other = (route(router, {}, drawn(seed), train=train) for seed in (0, 1))
    ids, scores = by_token(output)
    assert (ids < EXPERTS).all() and all(len(set(row)) == top_k for row in ids.tolist())
    assert_close(np.exp(scores), np.full(ids.shape, 1.0 / top_k), "elementwise")
    jax.tree.map(np.testing.assert_array_equal, output, other)


@every_control
def test_choice_is_the_same_on_every_mesh(name):
    ids, scores = by_token(route(build(name), {}, drawn(0), train=True))
    spread_ids, spread_scores = route_on_eight_devices(build(name), {}, drawn(0))
    assert spread_ids.tolist() == ids.tolist()
    np.testing.assert_array_equal(spread_scores, scores)


def test_hash_depends_on_the_token_id_alone():
    """By the token's id alone: not its place, not the step, not the mode; another seed is another
    table, and all experts are in it."""
    router = build("hash", 3)
    ids = by_token(route(router, {}, drawn(0)))[0]
    vocabulary = np.arange(TOKENS) % 7
    table = {int(v): tuple(ids[np.flatnonzero(vocabulary == v)[0]]) for v in set(vocabulary)}
    assert [tuple(row) for row in ids] == [table[int(v)] for v in vocabulary]
    for key in (jax.random.key(5), jax.random.key(6)):
        again = by_token(route(router, {}, drawn(1), train=True, key=key))[0]
        assert again.tolist() == ids.tolist()
    other = by_token(route(build("hash", 3, seed=1), {}, drawn(0)))[0]
    assert other.tolist() != ids.tolist()
    many = jnp.arange(4096, dtype=jnp.int32)
    inputs = inputs_of(jnp.zeros((4096, WIDTH)))
    inputs = dataclasses.replace(inputs, context={"tokens": many})
    counts = router.route({}, {}, inputs, train=False, key=None).statistics.counts
    # Each expert's load is binomial: five standard deviations of 4096 draws with p = 3/8.
    assert np.abs(np.asarray(counts) - 1536.0).max() < 5 * np.sqrt(4096 * 3 / 8 * 5 / 8)


def test_hash_without_ids_is_refused():
    inputs = RouterInputs(
        x=drawn(0), token_mask=jnp.ones(TOKENS, bool), segment_ids=jnp.ones(TOKENS, jnp.int32)
    )
    text = (
        "the router hash chooses by the ids of the tokens: give them as"
        " RouterInputs.context['tokens'], [T] i32"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        build("hash").route({}, {}, inputs, train=False, key=None)


def test_random_experts_change_in_training_and_not_in_evaluation():
    router = build("uniform_random")
    x = jnp.zeros((4096, WIDTH))
    keys = (jax.random.key(0), jax.random.key(1))
    trained = [route(router, {}, x, train=True, key=key) for key in keys]
    first, second = (by_token(output)[0] for output in trained)
    assert (first != second).any()
    evaluated = [by_token(route(router, {}, x, key=key))[0] for key in (None, keys[0])]
    assert evaluated[0].tolist() == evaluated[1].tolist()
    counts = np.asarray(trained[0].statistics.counts)
    assert np.abs(counts - 1024.0).max() < 5 * np.sqrt(4096 / 4 * 3 / 4)
    with pytest.raises(ValueError, match="^this router draws random numbers in training"):
        router.route({}, {}, inputs_of(x), train=True, key=None)


@pytest.mark.parametrize("top_k", [1, 2, 3, EXPERTS])
def test_forced_balance_is_exact(top_k):
    """In every stretch of E tokens, wherever it starts."""
    router = build("forced_balance", top_k)
    for start in (0, 3, 2**30):
        index = start + np.arange(EXPERTS, dtype=np.int32)
        output = route(router, {}, drawn(2, tokens=EXPERTS), index=index)
        assert output.statistics.counts.tolist() == [float(top_k)] * EXPERTS


@every_control
def test_unlearned_routers_do_not_warn(name, recwarn):
    """A constant gate is intended for a router without parameters."""
    MoEConfig(router=CONFIGS[name], top_k=1, balancers=())
    MoEConfig(router=CONFIGS[name], top_k=1, gate=SoftmaxGateConfig(), balancers=())
    assert not recwarn
