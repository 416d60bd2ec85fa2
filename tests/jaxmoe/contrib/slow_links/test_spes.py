# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Experts that one worker trains, and their merging."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import SpesConfig
from jaxmoe.contrib.slow_links.exchange import About
from jaxmoe.contrib.slow_links.expert_merging import ExpertMerging
from jaxmoe.contrib.slow_links.fragments import Leaf
from jaxmoe.contrib.slow_links.methods.spes import from_owner
from jaxmoe.contrib.slow_links.ownership import Ownership
from jaxmoe.contrib.slow_links.workers.local import local_of
from sharding import axes as ax
from tests.support import worker_runs as wr


def test_experts_come_from_their_owner_bit_for_bit():
    before, after = [], []
    for every, seen in ((100, before), (3, after)):
        config = SpesConfig(every=every, merging=0.0)
        last = wr.train(config, inner=optax.adamw(0.03), steps=3, run=max(every, 3))
        seen.append(last)
    alone, together = local_of(before[0]).params, after[0].params
    for worker in range(4):
        own = alone["experts"][worker, :, worker]
        assert (together["experts"][:, worker] == own).all()
        foreign = np.delete(np.asarray(alone["experts"][worker]), worker, axis=1)
        start = np.delete(np.asarray(wr.parameters()["experts"]), worker, axis=1)
        # Frozen between exchanges, weight decay included.
        assert (foreign == start).all()
    mean = jax.tree.map(lambda x: x.mean(0), alone)
    for path in ("a", "b"):
        np.testing.assert_allclose(together[path], mean[path], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("experts", "workers"), [(8, 4), (7, 3), (5, 4), (3, 1)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_workers_send_no_more_than_their_experts(experts, workers, pieces):
    """Also where a worker's devices have a part of the experts each; owners are uneven."""
    experts *= pieces
    rng = np.random.default_rng(0)
    given = rng.standard_normal((workers, 2, experts, 3)).astype(np.float32)
    given[0, 0, 0, 0] = -0.0
    owned = Ownership(workers=workers, axis=ax.EXPERTS)
    exchange, axes = from_owner(owned, experts), (ax.LAYERS, ax.EXPERTS, None)
    split = ((), ("piece",), ())

    def one(own):
        about = About(jnp.int32(0), jax.random.key(0), "worker", workers, axes, split)
        return exchange.mix(own, lambda payload, slow: payload, own, about, ())[0]

    cut = given.reshape(workers, 2, pieces, -1, 3).transpose(2, 0, 1, 3, 4)
    spread = jax.vmap(one, axis_name="worker")
    got = np.asarray(jax.jit(jax.vmap(spread, axis_name="piece"))(jnp.asarray(cut)))
    got = got.transpose(1, 2, 0, 3, 4).reshape(given.shape)
    owners = np.arange(experts) * workers // experts
    wanted = given[owners, :, np.arange(experts)].swapaxes(0, 1)
    for found in got:
        assert found.tobytes() == wanted.tobytes()
    most = np.bincount(owners).max()
    assert exchange.copies(workers) * experts == (workers - 1) * most


def test_moments_of_foreign_experts_stay_zero():
    state = wr.train(SpesConfig(every=2), inner=optax.adam(0.03), steps=5)
    moments = np.asarray(local_of(state).opt_state[0].nu["experts"])
    assert moments.shape[:3] == (4, 2, 4)
    is_own = np.eye(4, dtype=bool)[:, None]
    assert (np.where(is_own[..., None, None], 0.0, moments) == 0.0).all()
    assert (moments.swapaxes(1, 2)[np.eye(4, dtype=bool)] > 0.0).any()


def merging(experts, **fields):
    axes = (ax.LAYERS, ax.EXPERTS, ax.EXPERT_EMBED, ax.EXPERT_MLP)
    leaves = {
        path: Leaf(path, (2, experts, 6, 4), axes, role, True)
        for path, role in (("moe/in", "expert_in"), ("moe/out", "expert_out"))
    }
    rng = np.random.default_rng(0)
    params = {p: jnp.asarray(rng.standard_normal(leaves[p].shape), jnp.float32) for p in leaves}
    return ExpertMerging(leaves=leaves, **fields), params


def test_merging_draws_experts_to_the_nearest_four():
    rule, params = merging(7, rate=0.5, every=10, steps=40, nearest=4)
    got = jax.jit(rule.apply)(params, jnp.int32(20))
    for layer in range(2):
        first = np.asarray(params["moe/in"][layer]).reshape(7, -1)
        unit = first / np.linalg.norm(first, axis=1, keepdims=True)
        cosines = unit @ unit.T - 9 * np.eye(7)
        for expert in range(7):
            chosen = np.argsort(-cosines[expert])[:4]
            for path, x in params.items():
                old = np.asarray(x[layer])
                new = old[expert] + 0.25 * (old[chosen].mean(0) - old[expert])
                np.testing.assert_allclose(got[path][layer, expert], new, atol=1e-6)
    for step in (15, 40, 50):
        same = jax.jit(rule.apply)(params, jnp.int32(step))
        assert all((same[path] == params[path]).all() for path in params)


def test_merging_has_its_fixed_points():
    rule, params = merging(5, rate=1.0, every=1, steps=10**9, nearest=4)
    got = rule.apply(params, jnp.int32(1))["moe/out"]
    others = (params["moe/out"].sum(1, keepdims=True) - params["moe/out"]) / 4
    np.testing.assert_allclose(got, others, atol=1e-5)
    equal = {path: jnp.broadcast_to(x[:, :1], x.shape) for path, x in params.items()}
    for path, x in rule.apply(equal, jnp.int32(1)).items():
        np.testing.assert_allclose(x, equal[path], atol=1e-6)


def test_more_workers_than_experts_are_refused():
    with pytest.raises(ValueError, match="needs an expert for each of 5 workers, the model has 4"):
        SpesConfig().build(wr.facts(workers=5))
