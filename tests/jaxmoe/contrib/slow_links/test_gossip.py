# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Methods in which workers exchange with some others, or late."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import A2cid2Config, CO2Config, NoLoCoConfig, SingleMergeConfig
from jaxmoe.contrib.slow_links.gossip import matched_pairs, random_pairs, random_peers
from jaxmoe.contrib.slow_links.methods.a2cid2 import edges_of
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from tests.support import worker_runs as wr

INNER = optax.adam(0.03)


def at(params, worker):
    return jax.tree.map(lambda x: x[worker], params)


def mean_of(trees):
    return jax.tree.map(lambda *x: sum(x) / len(x), *trees)


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_tables_pair_every_worker_once(workers):
    for pairs in random_pairs(workers, 16, seed=0):
        peer = dict(pairs)
        assert sorted(peer) == list(range(workers))
        assert all(peer[peer[worker]] == worker for worker in peer)
        assert sum(worker == other for worker, other in pairs) == workers % 2
    rounds = random_peers(workers, 400, 0.25, seed=0)
    assert all(sender != receiver for pairs in rounds for sender, receiver in pairs)
    assert all(len({one for one, _ in pairs}) == len(pairs) for pairs in rounds)
    share = np.mean([len(pairs) / workers for pairs in rounds])
    assert share == pytest.approx(0.25, abs=0.04)


def test_noloco_equals_a_loop_over_pairs():
    config = NoLoCoConfig(every=3, pairings=3, seed=1)
    table = random_pairs(4, 3, seed=1)
    assert len(set(table)) > 1
    got = wr.train(config, inner=INNER, steps=9)
    slow, own = [wr.parameters()] * 4, [wr.parameters()] * 4
    m = [jax.tree.map(jnp.zeros_like, slow[0])] * 4
    moments = [INNER.init(slow[0])] * 4
    for step in range(9):
        for w in range(4):
            own[w], moments[w] = wr.own_step(INNER, own[w], moments[w], w, step)
        if (step + 1) % 3 == 0:
            peer = dict(table[step // 3])
            grad = [jax.tree.map(jnp.subtract, own[w], slow[w]) for w in range(4)]
            both = [mean_of([grad[w], grad[peer[w]]]) for w in range(4)]
            middle = [mean_of([slow[w], slow[peer[w]]]) for w in range(4)]
            m = [
                jax.tree.map(lambda m, g, p, s: 0.5 * m + 0.7 * g + 0.7 * (p - s), *trees)
                for trees in zip(m, both, middle, slow, strict=True)
            ]
            slow = [jax.tree.map(jnp.add, s, step) for s, step in zip(slow, m, strict=True)]
            own = list(slow)
    for w in range(4):
        assert wr.distance(at(local_of(got).params, w), own[w]) < 1e-6


def test_noloco_keeps_the_mean_of_slow_parameters():
    spreads = still_workers(NoLoCoConfig(every=1), 40)
    assert spreads[-1] < 1e-3 * spreads[0]


def test_a_second_copy_speeds_gossip_on_a_ring():
    """Eight workers on a ring: the mean stays, and the distance shrinks faster than without."""
    spreads = {
        gossip: still_workers(A2cid2Config(gossip=gossip), 80, workers=8)
        for gossip in ("continuous", "none")
    }
    assert spreads["continuous"][-1] < 0.5 * spreads["none"][-1] < 0.1 * spreads["none"][0]


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_matchings_follow_the_edges_of_a_graph(graph):
    edges = edges_of(graph, 6)
    assert len(edges) == {"ring": 6, "complete": 15}[graph]
    for pairs in matched_pairs(6, edges, 16, seed=0):
        peer = dict(pairs)
        assert all(peer[peer[worker]] == worker for worker in range(6))
        assert all(tuple(sorted(p)) in edges for p in pairs if p[0] != p[1])


def still_workers(config, steps, workers=4):
    """Largest distance of workers that do not train, before and after each step.

    The mean of their parameters stays, or where they have copies that of the sum of both.
    """
    spreads, means = [], []
    still = optax.sgd(0.0)
    training = wr.training_of(config, workers)
    state = training.begin(wr.new_state(wr.parameters(), still))
    noise = jax.tree.map(
        lambda x: x + jax.random.normal(jax.random.key(x.ndim), x.shape), local_of(state).params
    )
    talk = local_of(state).talks[0].replace(slow=noise)
    local = local_of(state).replace(params=noise, talks=(talk,))

    def watch(state):
        spreads.append(wr.spread(local_of(state).params))
        copies = {
            path: x
            for path, x in local_of(state).talks[0].exchange.items()
            if not isinstance(x, tuple)
        }
        halves = jax.tree.map(lambda x: 0.5 * x, copies)  # of the copy less the parameters
        params = local_of(state).params
        means.append({path: (x + halves.get(path, 0.0)).mean(0) for path, x in params.items()})

    first = with_local(state, local)
    spreads.append(wr.spread(noise))
    wr.train(config, inner=still, state=first, steps=steps, workers=workers, watch=watch)
    assert wr.distance(means[-1], jax.tree.map(lambda x: x.mean(0), noise)) < 1e-5
    return spreads


@pytest.mark.parametrize("clip", [None, 0.02])
def test_co2_equals_a_loop_that_is_a_round_late(clip):
    config = CO2Config(every=3, learning_rate=0.9, momentum=0.5, penalty=1.25, clip=clip)
    seen = []
    got = wr.train(
        config, inner=INNER, steps=13, watch=lambda s: seen.append(wr.spread(local_of(s).params))
    )
    slow, own, arrived = wr.parameters(), [wr.parameters()] * 4, None
    m, moments = jax.tree.map(jnp.zeros_like, slow), [INNER.init(slow)] * 4
    for step in range(13):
        if step > 0 and step % 3 == 0:
            mean = mean_of(own)
            if arrived is not None:
                m = jax.tree.map(lambda m, s, x: 0.5 * m + (s - x) / 1.25, m, slow, arrived)
                if clip is not None:
                    m = jax.tree.map(lambda m: jnp.clip(m, -clip, clip), m)
                slow = jax.tree.map(lambda s, m: s - 0.9 * m, slow, m)
                own = [slow] * 4
            arrived = mean
        for w in range(4):
            own[w], moments[w] = wr.own_step(INNER, own[w], moments[w], w, step)
    # After the last step the mean of step 12 is merged, and then what was learnt since.
    for latest in (False, True):
        mean = mean_of(own) if latest else arrived
        m = jax.tree.map(lambda m, s, x: 0.5 * m + (s - x) / 1.25, m, slow, mean)
        if clip is not None:
            m = jax.tree.map(lambda m: jnp.clip(m, -clip, clip), m)
        slow = jax.tree.map(lambda s, m: s - 0.9 * m, slow, m)
        own = [slow] * 4
    assert wr.distance(got.params, slow) < 1e-6
    for w in range(4):
        assert wr.distance(at(local_of(got).params, w), own[w]) < 1e-6
    assert wr.distance(got.params, wr.parameters()) > 0.01


def test_co2_with_a_large_penalty_freezes_the_slow_parameters():
    got = wr.train(CO2Config(every=3, penalty=1e30, momentum=0.0))
    assert wr.distance(got.params, wr.parameters()) == 0.0


def test_single_merge_mixes_by_rows_and_ends_in_the_mean():
    config, seen = SingleMergeConfig(every=2, peers=0.5, rounds=3), []
    wr.train(config, inner=INNER, steps=8, watch=lambda state: seen.append(local_of(state).params))
    table = random_peers(4, 3, 0.5, seed=0)
    own, moments = [wr.parameters()] * 4, [INNER.init(wr.parameters())] * 4
    for step in range(8):
        for w in range(4):
            own[w], moments[w] = wr.own_step(INNER, own[w], moments[w], w, step)
        if (step + 1) % 2 == 0:
            rows = np.eye(4)
            for sender, receiver in table[(step // 2) % 3]:
                rows[receiver] = 0.5 * (np.eye(4)[sender] + np.eye(4)[receiver])
            rows = np.full((4, 4), 0.25) if step == 7 else rows
            assert (rows.sum(1) == 1.0).all()
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *own)
            mixed = jax.tree.map(
                lambda x, rows=rows: jnp.tensordot(jnp.asarray(rows, x.dtype), x, 1), stacked
            )
            assert wr.distance(seen[step], mixed) < 1e-5
            own = [at(mixed, w) for w in range(4)]
    assert wr.spread(seen[-1]) == 0.0
    assert wr.spread(seen[5]) > 0.0


@pytest.mark.slow
def test_conditional_permutes_run_again_where_programs_are_stored(tmp_path):
    """A program for CPUs that came from the cache would end the process: see receive."""
    said = [
        subprocess.run(
            [sys.executable, "-c", _PERMUTES, str(tmp_path)], capture_output=True, text=True
        )
        for _ in range(3)
    ]
    assert [one.stdout for one in said] == ["72.0\n"] * 3, said[-1].stderr


_PERMUTES = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from jaxmoe.contrib.slow_links.exchange import About
from jaxmoe.contrib.slow_links.gossip import receive
table = [tuple((i, i ^ bit) for i in range(8)) for bit in (1, 2, 4)]

def all_leaves(tree, number):
    about = About(number, jax.random.key(0), "w", 8, (None,), ((),), is_spread=True)
    exchange = lambda tree: {name: receive(x, table, about, number) for name, x in tree.items()}
    return jax.lax.cond(number >= 0, exchange, lambda tree: tree, tree)

specs = {str(i): P("w") for i in range(24)}
mesh = jax.sharding.Mesh(jax.devices(), ("w",))
step = jax.jit(jax.shard_map(all_leaves, mesh=mesh,
                             in_specs=(specs, P()), out_specs=specs, check_vma=False))
tree = {name: jnp.ones((8 * 4096 * (1 + i % 3),)) for i, name in enumerate(specs)}
for number in range(200):
    tree = step(tree, jnp.int32(number))
print(float(tree["0"][:72].sum()))
"""
