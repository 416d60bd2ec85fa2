# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Shared stores: load of the cells, memory, seeds, and training against the plain model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jaxmoe.adapters import SharedStoreConfig, TargetsConfig, fold_adapters
from jaxmoe.contrib.adapters.shared_store import CELLS, STORE, places_of, uses_of
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import forward
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from tests.support.models import TINY
from tests.support.one_step import batch

ROLES = TargetsConfig(roles=("attention_in",))


def stored(compression, **given):
    return dataclasses.replace(
        TINY, adapter=SharedStoreConfig(compression=compression, targets=ROLES, **given)
    )


def plain_of(model, params):
    """The parameters of the plain model that a store makes."""
    return jax.jit(lambda params: fold_adapters(params, model.adapter, model.layer_numbers))(params)


@pytest.mark.parametrize(("cells", "total"), [(7, 30), (10, 10), (16, 11), (5, 25), (97, 1000)])
def test_load_of_cells_is_even(cells, total):
    numbers = jnp.arange(total, dtype=jnp.uint32)
    places, signs = places_of(numbers, cells, 3)
    load = np.bincount(np.asarray(places), minlength=cells)
    assert set(load) <= {total // cells, -(-total // cells)}, load
    np.testing.assert_array_equal(uses_of(cells, total, 3), np.maximum(load, 1))
    assert set(np.asarray(signs).tolist()) == {-1.0, 1.0}


def test_memory_is_that_of_the_cells():
    base = parameter_table(TINY)
    targets = [row for row in base if row.declaration.role in ROLES.roles]
    total = sum(row.size for row in targets)
    table = parameter_table(stored(8.0))
    held = {row.path: row for row in table.trained_rows}
    assert held[f"{STORE}/{CELLS}"].size == -(-total // 8)
    assert sum(row.size for row in held.values()) == base.total - total + -(-total // 8)
    frozen = sum(row.size for row in table if row.is_frozen)
    assert frozen == 5 * sum(row.shape[0] for row in targets) < 0.1 * total


def test_two_seeds_make_other_weights_of_equal_cells():
    one, other = (stored(4.0, seed=seed) for seed in (0, 1))
    params = init_params(one, jax.random.key(0))
    first, second = (
        traverse_util.flatten_dict(plain_of(model, params), sep="/") for model in (one, other)
    )
    for row in parameter_table(TINY):
        is_equal = np.array_equal(first[row.path], second[row.path])
        assert is_equal == (row.declaration.role not in ROLES.roles), row.path
        if not is_equal:
            std = float(np.std(first[row.path]))
            assert abs(std / row.init_std - 1.0) < 0.15, (row.path, std, row.init_std)


@pytest.mark.slow
def test_gradient_of_a_cell_is_the_mean_over_its_uses():
    model = stored(3.0)
    table, params = parameter_table(model), init_params(model, jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (2, 6), 0, TINY.vocab_size)

    def loss(used, params):
        return jnp.mean(forward(used, ExecutionConfig(), params, ids).logits ** 2)

    def of_store(trained):
        return loss(model, table.merge(trained, params))

    value, grads = jax.jit(jax.value_and_grad(of_store))(table.select_trained(params))
    plain, wanted = jax.jit(jax.value_and_grad(lambda given: loss(TINY, given)))(
        plain_of(model, params)
    )
    np.testing.assert_allclose(value, plain, rtol=1e-6)
    flat = traverse_util.flatten_dict(wanted, sep="/")
    rows = [row for row in parameter_table(TINY) if row.declaration.role in ROLES.roles]
    total = sum(row.size for row in rows)
    cells = grads[STORE][CELLS].size
    places, signs = places_of(jnp.arange(total, dtype=jnp.uint32), cells, 0)
    scales = np.concatenate([np.full(row.size, row.init_std / rows[0].init_std) for row in rows])
    values = np.concatenate([np.ravel(flat[row.path]) for row in rows]) * scales * signs
    sums = np.bincount(np.asarray(places), weights=values, minlength=cells)
    expected = sums / np.bincount(np.asarray(places), minlength=cells)
    np.testing.assert_allclose(grads[STORE][CELLS], expected, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
def test_as_many_cells_as_weights_train_bitwise_like_the_plain_model():
    """Adam without clipping, whose update of a value depends on no other value."""
    model, optimizer = stored(1.0), adamw(1e-2)
    state = init_state(model, optimizer, jax.random.key(0))
    base = jax.tree.map(np.asarray, plain_of(model, state.params))
    plain = init_state(TINY, optimizer, jax.random.key(0))
    plain = dataclasses.replace(plain, params=jax.tree.map(jnp.asarray, base))
    steps = [
        make_train_step(each, optimizer, clip=None, table=parameter_table(each))
        for each in (model, TINY)
    ]
    for _ in range(3):
        state, metrics = steps[0](state, batch())
        plain, wanted = steps[1](plain, batch())
        assert float(metrics.loss) == float(wanted.loss)
    found = plain_of(model, state.params)
    for one, other, old in zip(*map(jax.tree.leaves, (found, plain.params, base)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.max(np.abs(np.asarray(one) - old)) > 0.0


def test_what_a_store_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"adapter.compression=0.0 must be above 0"):
        SharedStoreConfig(compression=0.0)
    with pytest.raises(ValueError, match=r"adapter.targets.layers=\(1,\): layers are one array"):
        SharedStoreConfig(targets=TargetsConfig(layers=(1,)))
