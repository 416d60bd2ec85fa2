# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Weights of the workers in a mean: tokens, and participation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import CO2Config, DiLoCoConfig, SparseConfig, StreamingConfig
from jaxmoe.contrib.slow_links.weighting import LONGEST_PAUSE, by_participation, by_tokens
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.between_jobs import BetweenJobs
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from tests.support import worker_runs as wr

SIZES = (8, 2, 5, 1)
AVERAGE: dict[str, Any] = {"learning_rate": 1.0, "momentum": 0.0}
INNER = optax.adam(0.03)


def pooled(steps):
    """Parameters after SGD on the rows of all workers together."""
    params, total = wr.parameters(), sum(SIZES)
    for step in range(steps):
        grads = [
            jax.grad(wr.loss)(params, *(part[:n] for part in wr.rows(w, step)))
            for w, n in enumerate(SIZES)
        ]
        params = jax.tree.map(
            lambda x, *g: x - 0.05 * sum(n * one for n, one in zip(SIZES, g, strict=True)) / total,
            params,
            *grads,
        )
    return params


CONFIGS = {
    "diloco": DiLoCoConfig(every=1, **AVERAGE),
    "streaming": StreamingConfig(
        **dict(every=1, fragments=1, delay=0, keep=0.0, codec="float32"), **AVERAGE
    ),
    "sparse": SparseConfig(every=1, kept=4096, values="float32"),
    "co2": CO2Config(every=1, delay=0, momentum=0.0, clip=None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_make_the_mean_that_of_the_pooled_rows(name):
    wanted = pooled(6)
    config = dataclasses.replace(CONFIGS[name], weights="tokens")
    got = wr.train(config, steps=6, sizes=SIZES)
    assert wr.distance(got.params, wanted) < 1e-6
    unweighted = wr.train(CONFIGS[name], steps=6, sizes=SIZES)
    assert wr.distance(unweighted.params, wanted) > 1e-3


def test_equal_weights_have_no_state():
    for weights in ("equal", "tokens"):
        training = wr.training_of(DiLoCoConfig(every=1, weights=weights))
        state = training.begin(wr.new_state(wr.parameters(), wr.SGD))
        assert len(jax.tree.leaves(local_of(state).talks[0])) == (weights == "tokens")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("diloco", "tokens"),
        ("streaming", "participation"),
        ("sparse", "tokens"),
        ("co2", "participation"),
    ],
)
def test_workers_that_do_the_same_have_equal_weights(name, weights):
    usual = {
        "diloco": DiLoCoConfig(every=3),
        "streaming": StreamingConfig(every=4, fragments=2, delay=3),
        "sparse": SparseConfig(every=3, kept=1024, reduce="senders"),
        "co2": CO2Config(every=3),
    }[name]
    states = [
        wr.train(config, inner=INNER, steps=8)
        for config in (usual, dataclasses.replace(usual, weights=weights))
    ]
    assert wr.distance(local_of(states[0]).params, local_of(states[1]).params) < 1e-6


@pytest.mark.parametrize("weights", ["tokens", "participation"])
def test_an_absent_worker_does_not_count_and_keeps_its_error(weights):
    """Worker 2 refuses all steps of the second round: the others make the mean, as three do."""
    config = SparseConfig(every=2, kept=1024, values="float32", weights=weights)
    absent = np.zeros((4, 4), bool)
    absent[2:, 2] = True
    absent[0, 0] = True  # one of two steps: worker 0 is present
    seen = []
    state = wr.train(config, steps=4, absent=absent, watch=seen.append)
    talks = [local_of(state).talks[0].codec for state in seen]
    for path in ("a", "experts"):
        errors = [np.asarray(talk[path][0]) for talk in talks]
        assert (errors[3][2] == errors[1][2]).all() and np.abs(errors[1][2]).max() > 0
        others = [0, 1, 3]
        assert all((errors[3][w] != errors[1][w]).any() for w in others)
        # What was sent is decay * error + message - next error.
        before, own = np.asarray(seen[1].params[path]), np.asarray(local_of(seen[2]).params[path])
        grads = [jax.grad(wr.loss)(wr_at(seen[2], w), *wr.rows(w, 3))[path] for w in others]
        sent = [
            0.95 * errors[1][w] + before - (own[w] - 0.05 * np.asarray(g)) - errors[3][w]
            for w, g in zip(others, grads, strict=True)
        ]
        np.testing.assert_allclose(state.params[path], before - sum(sent) / 3, atol=1e-6)


def wr_at(state, worker):
    return jax.tree.map(lambda x: x[worker], local_of(state).params)


def test_a_round_without_any_worker_changes_nothing():
    absent = np.zeros((6, 4), bool)
    absent[3:] = True
    for config in (SparseConfig(every=3, weights="tokens"), CO2Config(every=3, weights="tokens")):
        seen = []
        wr.train(config, steps=6, absent=absent, watch=seen.append, run=20)
        talks = [local_of(state).talks[0].codec for state in seen]
        assert jax.tree.all(jax.tree.map(np.array_equal, talks[2], talks[5]))
        assert wr.distance(seen[5].params, seen[2].params) == 0.0
        assert np.isfinite(np.asarray(local_of(seen[5]).spread)).all()


def test_participation_is_the_mean_pause_before_a_round_cut_at_fifty():
    weighting = by_participation()
    rounds = np.zeros((120, 3), bool)
    rounds[:, 0] = True
    rounds[3::4, 1] = True  # pauses of 4 rounds
    state = jax.tree.map(lambda x: jnp.broadcast_to(x, (3,)), weighting.init())
    step = jax.jit(lambda s, is_in: weighting.close(weighting.add(s, jnp.ones(3), ~is_in)))
    weights = []
    for is_in in rounds:
        weight, state = step(state, jnp.asarray(is_in))
        weights.append(np.asarray(weight))
    weights = np.stack(weights)
    assert (weights[:, 0] == 1).all() and (weights[:, 2] == 0).all()
    assert weights[:9, 1].tolist() == [0, 0, 0, 1, 0, 0, 0, 4, 0] and weights[119, 1] == 4
    assert float(state.mean[2]) == LONGEST_PAUSE and float(state.pauses[2]) == 2


def test_weights_of_sites_equal_those_of_one_program():
    config = DiLoCoConfig(every=1, weights="tokens")
    whole = wr.train(config, steps=1, sizes=SIZES)
    training = wr.training_of(config)
    training = dataclasses.replace(training, workers=Workers(1, is_spread=False))
    between, messages, states = BetweenJobs(training), [], []
    fragment = training.fragments[0]
    for worker, size in enumerate(SIZES):
        state = training.begin(wr.new_state(wr.parameters(), wr.SGD))
        x, y = wr.rows(worker, 0)
        grads = jax.grad(wr.loss)(wr.parameters(), x[:size], y[:size])
        own = jax.tree.map(lambda p, g: (p - 0.05 * g)[None], wr.parameters(), grads)
        talk = local_of(state).talks[0]
        count = by_tokens().add(
            talk.weighting, jnp.asarray([size], jnp.float32), jnp.zeros(1, bool)
        )
        talks = (dataclasses.replace(talk, weighting=count),)
        local = dataclasses.replace(local_of(state), params=own, talks=talks)
        state = with_local(dataclasses.replace(state, step=state.step + 1), local)
        message, state = between.encode(fragment, state)
        messages.append(message)
        states.append(state)
    after = between.merge(fragment, states[3], messages)
    assert float(local_of(states[3]).talks[0].weighting[0]) == 0.0
    assert wr.distance(after.params, whole.params) < 1e-6
