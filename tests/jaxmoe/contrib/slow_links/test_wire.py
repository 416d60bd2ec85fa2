# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges on a mesh of four workers: bytes of the compiled program, and values as under vmap."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.slow_links import (
    A2cid2Config,
    DiLoCoConfig,
    NoLoCoConfig,
    SingleMergeConfig,
    SparseConfig,
    SpesConfig,
    StreamingConfig,
)
from jaxmoe.contrib.slow_links.cost import cost
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.method import begin, merge, send
from jaxmoe.contrib.slow_links.workers.arrays import Workers
from jaxmoe.contrib.slow_links.workers.local import local_of
from jaxmoe.contrib.slow_links.workers.step import exchange_late, exchange_now
from jaxmoe.planning.hlo import collectives
from jaxmoe.planning.mesh_axes import bytes_by_axes
from sharding import MeshConfig, make_mesh
from sharding import axes as ax
from tests.support import worker_runs as wr

KINDS = {
    "diloco": (DiLoCoConfig(every=3), {"all-reduce"}),
    "weighted": (DiLoCoConfig(every=3, weights="tokens"), {"all-gather", "all-reduce"}),
    "streaming": (StreamingConfig(every=4, fragments=2), {"all-reduce", "collective-permute"}),
    "sparse": (SparseConfig(every=3), {"all-reduce", "collective-permute"}),
    "spes": (SpesConfig(every=3, merging=0.0), {"all-reduce", "collective-permute"}),
    "noloco": (NoLoCoConfig(every=3, pairings=1), {"collective-permute"}),
    "single_merge": (
        SingleMergeConfig(every=3, peers=1.0, rounds=1, complete_from=1.0),
        {"all-reduce", "collective-permute"},
    ),
}
"""Method, and the kinds of its collectives."""


def exchange(training, workers, number, params):
    """Results of one exchange of a fragment by workers with different parameters."""
    method, fragment = training.method, training.fragments[number]
    part = fragment.take(params)
    talk = begin(method, training.leaves, part, workers)
    noise = jnp.arange(1.0, 1.0 + workers.number, dtype=jnp.float32)
    if (weighting := method.weighting) is not None:
        talk = dataclasses.replace(talk, weighting=weighting.add(talk.weighting, noise, noise < 0))
    own = jax.tree.map(
        lambda x: x * (1 + 0.1 * noise.reshape(-1, *(1,) * (x.ndim - 1))), workers.stack(part)
    )
    return send(
        method,
        training.leaves,
        talk,
        own,
        part if method.is_shared else None,
        workers,
        number=jnp.zeros((), jnp.int32),
        key=jax.random.key(3),
    )


@pytest.mark.parametrize("name", KINDS)
def test_bytes_of_an_exchange_are_those_of_its_codec(name):
    config, kinds = KINDS[name]
    training, mesh = wr.training_of(config), make_mesh(MeshConfig(replica=4), jax.devices()[:4])
    bill, seen = cost(training.method, wr.LEAVES, 4), set()
    for number in range(len(training.fragments)):
        expected = jax.jit(functools.partial(exchange, training, training.workers, number))(
            wr.parameters()
        )
        with jax.set_mesh(mesh):
            spread = functools.partial(exchange, training, Workers(4, is_spread=True), number)
            compiled = jax.jit(spread).lower(wr.parameters()).compile()
            got = compiled(wr.parameters())
        rows = bytes_by_axes(collectives(compiled.as_text()), mesh.shape)
        seen |= {row.kind for row in rows}
        # Both branches of single_merge stand in the program; one of four exchanges is complete.
        often = {"all-reduce": 0.25, "collective-permute": 0.75} if name == "single_merge" else {}
        sent = sum(row.wire_bytes * often.get(row.kind, 1) for row in rows)
        assert sent == pytest.approx(bill.exchanges[number], abs=1e-6)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    assert seen == kinds


@pytest.mark.parametrize("delay", [1, 0])
def test_a_step_does_not_wait_for_a_message_that_overlaps_it(delay):
    """What a step reads needs no collective where the message of that step is merged later."""
    config = StreamingConfig(every=4, fragments=2, delay=delay)
    workers = Workers(4, is_spread=True)
    training = dataclasses.replace(wr.training_of(config), workers=workers)
    exchange = functools.partial(exchange_late, sent=(0, 1)) if delay else exchange_now

    def read_by_the_step(state):
        after = exchange(training, state)
        return local_of(after).params, after.params, after.opt_state

    params = wr.parameters()
    with jax.set_mesh(make_mesh(MeshConfig(replica=4), jax.devices()[:4])):
        state = jax.jit(lambda: training.begin(wr.new_state(params, wr.SGD)))()
        programs = [
            jax.jit(function).lower(state).compile()
            for function in (functools.partial(exchange, training), read_by_the_step)
        ]
    whole, read = ({row.kind for row in collectives(p.as_text())} for p in programs)
    assert "collective-permute" in whole
    assert bool(read) == (delay == 0), read


def test_gossip_reduces_two_integers_over_all_workers_and_no_parameter():
    """The numbers of refused steps, by which all processes stop alike."""
    training = wr.training_of(NoLoCoConfig(every=1, pairings=1))
    training = dataclasses.replace(training, workers=Workers(4, is_spread=True))
    mesh = make_mesh(MeshConfig(replica=4), jax.devices()[:4])
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: training.begin(wr.new_state(wr.parameters(), wr.SGD)))()
        compiled = jax.jit(functools.partial(exchange_now, training)).lower(state).compile()
    rows = bytes_by_axes(collectives(compiled.as_text()), mesh.shape)
    wire = {row.kind: row.wire_bytes for row in rows}
    assert wire.keys() == {"collective-permute", "all-reduce"}
    assert wire["all-reduce"] <= 2 * 2 * 4  # two numbers of four bytes, up and down
    assert wire["collective-permute"] == cost(training.method, wr.LEAVES, 4).exchanges[0]


def test_a_worker_has_one_clock_for_all_its_parameters():
    """Equal parameters stay equal, and workers draw times of their own."""
    leaves = [wr.LEAVES[0]._replace(path=path) for path in ("a", "same")]
    method = A2cid2Config().build(TrainingFacts(leaves, 4, 10))
    workers, known = Workers(4, is_spread=False), {leaf.path: leaf for leaf in leaves}
    start = dict.fromkeys(known, wr.parameters()["a"])
    talk = begin(method, known, start, workers)
    noise = jax.random.normal(jax.random.key(0), (4, *leaves[0].shape))
    own = dict.fromkeys(known, noise)

    @jax.jit
    def once(talk, own, number):
        key = jax.random.fold_in(jax.random.key(1), number)
        params, talk = send(method, known, talk, own, None, workers, number=number, key=key)
        return talk.replace(slow=params), params

    for number in range(4):
        talk, own = once(talk, own, jnp.int32(number))
        np.testing.assert_array_equal(own["a"], own["same"])
        both = 2 * own["a"] + talk.exchange["a"]  # the parameters and their copy
        np.testing.assert_allclose(both.mean(0), 2 * noise.mean(0), atol=1e-5)
    assert np.abs(own["a"].mean(0) - noise.mean(0)).max() > 1e-3


def test_experts_of_a_sharded_worker_come_from_their_owner():
    """Two workers of two devices, each with half of the experts of its worker; with merging."""
    config = SpesConfig(every=3, merging=0.5, merging_every=3)
    training = wr.training_of(config, workers=2)
    mesh = make_mesh(MeshConfig(replica=2, expert=2), jax.devices()[:4])

    def run(params, workers):
        pseudo, talk = exchange(training, workers, 0, params)
        own, slow, _, _ = merge(
            training.method,
            talk,
            pseudo,
            workers.stack(params),
            params,
            (),
            workers,
            number=jnp.zeros((), jnp.int32),
        )
        return pseudo, own, slow

    expected = jax.jit(functools.partial(run, workers=training.workers))(wr.parameters())
    params = wr.parameters()
    with jax.set_mesh(mesh):
        spec = jax.P(None, ax.EXPERT)
        params["experts"] = jax.device_put(params["experts"], jax.NamedSharding(mesh, spec))
        got = jax.jit(functools.partial(run, workers=Workers(2, is_spread=True)))(params)
    assert got[2]["experts"].sharding.spec[1] == ax.EXPERT
    assert wr.distance(got[0], wr.parameters()) > 0.1
    assert wr.distance(got[0], got[2]) > 0.01
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    owned = wr.parameters()["experts"] * jnp.asarray([1.1, 1.1, 1.2, 1.2])[None, :, None, None]
    np.testing.assert_allclose(got[0]["experts"], owned, rtol=1e-6)
