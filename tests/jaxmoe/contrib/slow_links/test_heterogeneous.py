# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Workers of which some send less than the others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import HeterogeneousConfig, SparseConfig
from jaxmoe.contrib.slow_links.cost import cost
from jaxmoe.contrib.slow_links.method import begin, send
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.between_jobs import BetweenJobs
from jaxmoe.contrib.slow_links.workers.local import local_of
from jaxmoe.planning.hlo import collectives
from sharding import MeshConfig, make_mesh
from tests.support import worker_runs as wr

CONFIG = HeterogeneousConfig(every=3, kept=1024, slow=(0, 2), slow_kept=256)
ENCODED = ("a", "experts")


@pytest.mark.parametrize(
    ("slow", "kept"), [((), 1024), pytest.param((0, 1, 2, 3), 256, marks=pytest.mark.slow)]
)
def test_alike_workers_are_those_of_sparse(slow, kept):
    configs = dataclasses.replace(CONFIG, slow=slow), SparseConfig(every=3, kept=kept)
    states = [wr.train(config, inner=optax.adam(0.03), steps=6) for config in configs]
    assert wr.distance(states[0].params, states[1].params) == 0.0
    assert wr.distance(local_of(states[0]).talks, local_of(states[1]).talks) == 0.0
    bills = [cost(config.build(wr.facts()), wr.LEAVES, 4) for config in configs]
    assert bills[0] == bills[1]


def exchange(training, workers, params):
    """Pseudo-gradient and state of one exchange of workers with different parameters."""
    method = training.method
    talk = begin(method, training.leaves, params, workers)
    if (weighting := method.weighting) is not None:
        tokens = jnp.arange(1.0, 5.0, dtype=jnp.float32)
        talk = dataclasses.replace(
            talk, weighting=weighting.add(talk.weighting, tokens, tokens < 0)
        )
    own = jax.tree.map(lambda x, noise: x + noise, workers.stack(params), noises())
    return send(
        method,
        training.leaves,
        talk,
        own,
        params,
        workers,
        number=jnp.zeros((), jnp.int32),
        key=jax.random.key(3),
    )


def sent_of(codec, x):
    payload, (error, _) = codec.encode(x, codec.init(x), jax.random.key(0))
    return codec.decode(payload, x), error


def noises():
    return {
        leaf.path: jax.random.normal(jax.random.key(len(leaf.shape)), (4, *leaf.shape))
        for leaf in wr.LEAVES
    }


@pytest.mark.parametrize(
    "fields", [{"reduce": "senders"}, pytest.param({"weights": "tokens"}, marks=pytest.mark.slow)]
)
def test_each_worker_sends_and_remembers_what_its_own_codec_gives(fields):
    config = dataclasses.replace(CONFIG, **fields)
    training = wr.training_of(config)
    mixed, talk = jax.jit(functools.partial(exchange, training, training.workers))(wr.parameters())
    codecs = [
        SparseConfig(kept=256 if w in CONFIG.slow else 1024).build(wr.facts()).codec
        for w in range(4)
    ]
    given = noises()
    factors = np.arange(1, 5) * 0.4 if "weights" in fields else np.ones(4)
    for leaf in wr.LEAVES:
        if leaf.path not in ENCODED:
            continue
        total, count = np.zeros(leaf.shape), np.zeros(leaf.shape)
        for w in range(4):
            codec, x = codecs[w](leaf), -given[leaf.path][w]
            sent, error = jax.jit(functools.partial(sent_of, codec))(x)
            sent = np.asarray(sent)
            total, count = total + factors[w] * sent, count + factors[w] * (sent != 0)
            np.testing.assert_allclose(talk.codec[leaf.path][0][w], error, atol=1e-6)
        if "reduce" not in fields:
            count = np.full(leaf.shape, 4.0)
        wanted = total / np.where(count > 0, count, 1)
        np.testing.assert_allclose(mixed[leaf.path], wanted, atol=1e-6)


@pytest.mark.slow
def test_bytes_of_slow_and_fast_workers_are_those_of_the_program():
    training, mesh = wr.training_of(CONFIG), make_mesh(MeshConfig(replica=4), jax.devices()[:4])
    wanted = jax.jit(functools.partial(exchange, training, training.workers))(wr.parameters())
    spread = functools.partial(exchange, training, Workers(4, is_spread=True))
    with jax.set_mesh(mesh):
        compiled = jax.jit(spread).lower(wr.parameters()).compile()
        got = compiled(wr.parameters())
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    sent = np.zeros(4)
    for row in collectives(compiled.as_text() or ""):
        if row.kind == "collective-permute":
            for source, _ in row.groups:
                sent[source] += row.wire_bytes
        else:
            assert row.kind == "all-reduce"
            sent += row.wire_bytes
    bills = [cost(training.method, wr.LEAVES, 4, worker).peak for worker in range(4)]
    np.testing.assert_allclose(sent, bills)
    assert bills[0] == bills[2] < bills[1] == bills[3]
    assert cost(training.method, wr.LEAVES, 4).peak == pytest.approx(np.mean(bills))


def test_slow_workers_send_a_quarter_of_large_matrices():
    leaf = wr.LEAVES[0]._replace(shape=(512, 2048))
    method = HeterogeneousConfig(slow=(1,)).build(wr.facts()._replace(leaves=[leaf]))
    tiles = 8 * 32
    for worker, kept in ((0, 64), (1, 16)):
        # 14 bits a number kept, and a table of four values.
        wanted = 3 * (14 * tiles * kept + 4 * 32) / 8
        assert cost(method, [leaf], 4, worker).peak == wanted


def test_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="slow_kept=65 must be at least 1 and at most .*kept=64"):
        HeterogeneousConfig(slow_kept=65)
    with pytest.raises(ValueError, match="has a worker twice"):
        HeterogeneousConfig(slow=(1, 1))
    with pytest.raises(ValueError, match="from 0 to 3"):
        HeterogeneousConfig(slow=(4,)).build(wr.facts())
    with pytest.raises(ValueError, match="sites exchange means"):
        BetweenJobs(wr.training_of(CONFIG))
