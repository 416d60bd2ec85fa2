# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""LIFT against plain selection of entries, and its range finder against an exact decomposition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import LiftConfig, TargetsConfig, fold_adapters
from jaxmoe.contrib.adapters.sparse import dense, largest_places, low_rank_approximation
from jaxmoe.execution import ExecutionConfig
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.state import state_around
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY
from tests.support.one_step import batch

LIFT = LiftConfig(
    rank=1,
    approximation_rank=3,
    refresh_every=3,
    targets=TargetsConfig(roles=("attention_out", "expert_in"), layers=(1,)),
)


def matrix(m, n):
    """A matrix whose singular values fall by a third each, so that its best approximation is near
    what a range finder sees."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.standard_normal((size, 12)))[0] for size in (m, n))
    return jnp.asarray((left * 0.67 ** np.arange(12)) @ right.T, jnp.float32)


def test_range_finder_approximates_as_an_exact_decomposition():
    weight, rank = matrix(40, 30), 5
    u, s, v = map(np.asarray, jnp.linalg.svd(weight, full_matrices=False))
    exact = (u[:, :rank] * s[:rank]) @ v[:rank]
    found = low_rank_approximation(weight, rank, jax.random.key(1))
    np.testing.assert_allclose(found, exact, atol=2e-5)
    wanted = np.sort(np.argsort(-np.abs(exact).reshape(-1))[:70])
    np.testing.assert_array_equal(largest_places(weight, rank, 70, jax.random.key(1)), wanted)
    np.testing.assert_array_equal(low_rank_approximation(weight, 30, jax.random.key(1)), weight)


def test_entries_are_added_to_their_matrix():
    entries, places = jnp.asarray([[1.0, 2.0], [3.0, 4.0]]), jnp.asarray([[0, 5], [1, 3]])
    found = np.asarray(dense(entries, places, (2, 2, 3)))
    assert found.tolist() == [[[1, 0, 0], [0, 0, 2]], [[0, 3, 0], [4, 0, 0]]]


def flat(tree):
    return {
        name: np.asarray(leaf) for name, leaf in traverse_util.flatten_dict(tree, sep="/").items()
    }


@pytest.mark.slow
def test_only_k_entries_change_and_chosen_ones_keep_their_moments_at_a_refresh():
    model = dataclasses.replace(TINY, adapter=LIFT)
    table, optimizer = parameter_table(model), adamw(1e-2)
    params = init_params(model, jax.random.key(0))
    key, execution = jax.random.key(1), ExecutionConfig()
    state = state_around(model, optimizer, execution, params, key)
    base = flat(init_params(TINY, jax.random.key(0)))
    fold = jax.jit(lambda params: fold_adapters(params, LIFT, model.layer_numbers))
    np.testing.assert_array_equal(fold(state.params)["head"]["weight"], base["head/weight"])
    step, rows, states = make_train_step(model, optimizer), batch(), []
    for _ in range(3):
        states.append(jax.tree.map(jnp.copy, state))
        state, metrics = step(state, rows)
    assert np.isfinite(float(metrics.loss)) and int(state.skipped) == 0
    before, after = flat(states[-1].params), flat(state.params)
    merged = flat(fold(states[-1].params))
    for row in table:
        if ":" in row.path:
            continue
        places = before.get(f"{row.path}:places")
        changed = merged[row.path] != base[row.path]
        assert np.array_equal(before[row.path], base[row.path]), row.path  # the base has not moved
        if places is None:
            assert not changed.any(), row.path
            continue
        k, (m, n) = places.shape[-1], (row.declaration.fan(0), row.declaration.fan(1))
        assert k == m + n
        counts = changed.reshape(*places.shape[:-1], -1).sum(axis=-1)
        assert (counts[1] == k).all() and (counts[0] == 0).all(), row.path
        check_refresh(row.path, states[-1], state, before, after)
    state, _ = step(state, rows)
    moved = flat(state.params)
    for row in table:
        same = np.array_equal(moved[row.path], after[row.path])
        assert same == row.is_frozen, row.path


def check_refresh(path, old, new, before, after):
    """Assert that a refresh adds the entries to the matrix and carries over what stays."""
    places, chosen = before[f"{path}:places"], after[f"{path}:places"]
    assert not after[f"{path}:entries"].any()
    changed = after[path] != before[path]
    assert changed.reshape(*places.shape[:-1], -1)[1].sum() == places[1].size
    name = f"{path.rpartition('/')[2]}:entries"
    moments = []
    for state in (old, new):
        leaves = jax.tree_util.tree_flatten_with_path(state.opt_state)[0]
        moments.append(
            [np.asarray(x) for keys, x in leaves if getattr(keys[-1], "key", "") == name]
        )
    assert len(moments[0]) == len(moments[1]) == 2  # of AdamW
    for here in moments[1]:
        for one in np.ndindex(places.shape[:-1]):
            kept = np.isin(chosen[one], places[one])
            assert kept.any()
            # Where an entry is new its moment is 0; the update of the third step came before.
            assert not here[one][~kept].any() and (one[0] == 0 or here[one][kept].any())
