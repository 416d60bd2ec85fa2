# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of methods of low-communication training, on a regression of four workers.

To add a method: a row in METHODS.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jaxmoe.replicas import REPLICAS, DiLoCoConfig
from tests.support import worker_runs as wr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a method promises."""

    degenerate: object
    """Config with which it equals synchronous SGD."""
    usual: object
    """Config for short runs."""
    is_equal_after: tuple[int, ...] = ()
    """Steps after which all workers have bitwise equal parameters."""


METHODS = {
    "diloco": Row(
        degenerate=DiLoCoConfig(every=1, learning_rate=1.0, momentum=0.0),
        usual=DiLoCoConfig(every=3),
        is_equal_after=(3, 6, 9, 12),
    ),
}


def test_every_method_has_a_row():
    named = {name for name, config in REPLICAS.items() if config.exchanges == "parameters"}
    assert set(METHODS) == named


@pytest.mark.parametrize("name", METHODS)
def test_degenerate_settings_equal_synchronous_steps(name):
    state = wr.train(METHODS[name].degenerate)
    assert wr.distance(state.params, wr.synchronous()) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_workers_are_bitwise_equal_after_an_exchange(name):
    row, spreads = METHODS[name], {}
    wr.train(row.usual, watch=lambda s: spreads.setdefault(int(s.step), wr.spread(s.local.params)))
    assert {step for step, value in spreads.items() if value == 0.0} >= set(row.is_equal_after)
    assert any(value > 0.0 for value in spreads.values())


def test_diloco_equals_two_loops():
    inner, outer = optax.adam(0.03), optax.sgd(0.7, 0.9, nesterov=True)
    state = wr.train(DiLoCoConfig(every=3), inner=inner, steps=9)
    slow = wr.parameters()
    workers: list = [slow] * 4
    moments, outer_state = [inner.init(slow)] * 4, outer.init(slow)
    for step in range(9):
        for w in range(4):
            grads = jax.grad(wr.loss)(workers[w], *wr.rows(w, step))
            with jax.numpy_dtype_promotion("standard"):
                updates, moments[w] = inner.update(grads, moments[w], workers[w])
            workers[w] = optax.apply_updates(workers[w], updates)
        if (step + 1) % 3 == 0:
            delta = jax.tree.map(lambda s, *w: s - sum(w) / 4, slow, *workers)
            updates, outer_state = outer.update(delta, outer_state, slow)
            slow = optax.apply_updates(slow, updates)
            workers = [slow] * 4
    assert wr.distance(state.params, slow) < 1e-6
    assert np.isfinite(np.asarray(state.local.spread)).all()
