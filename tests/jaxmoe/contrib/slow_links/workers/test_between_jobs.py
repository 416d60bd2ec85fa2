# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Exchanges that leave the program equal those of the workers of one program, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import DiLoCoConfig, NoLoCoConfig, SparseConfig, StreamingConfig
from jaxmoe.contrib.slow_links.workers.between_jobs import (
    BetweenJobs,
    digest,
    from_bytes,
    is_finite,
    to_bytes,
)
from jaxmoe.contrib.slow_links.workers.local import local_of, with_local
from jaxmoe.contrib.slow_links.workers.state import WorkerTraining
from jaxmoe.contrib.slow_links.workers.step import exchange_now
from jaxmoe.execution import ExecutionConfig
from jaxmoe.routing import METHODS
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import state_around
from jaxmoe.training.step import Step
from tests.support.models import MOE, TINY
from tests.support.one_step import params_of
from tests.support.worker_runs import SGD, WORKERS, new_state, parameters, training_of

ROUNDS = 3


def _stepped(state, seed):
    """The state after steps that random numbers stand for: other parameters on every worker."""
    rng, local = np.random.default_rng(seed), local_of(state)

    def moved(x):
        return x + jnp.asarray(0.01 * rng.standard_normal(x.shape), x.dtype)

    past = None
    if local.past is not None:
        past = jax.tree.map(
            lambda x: jnp.asarray(rng.integers(0, 9, x.shape)).astype(x.dtype), local.past
        )
    local = dataclasses.replace(local, params=jax.tree.map(moved, local.params), past=past)
    return with_local(dataclasses.replace(state, step=state.step + 1), local)


def _one(state, worker):
    """The state of a site: that of one worker."""
    local = jax.tree.map(lambda x: x[worker : worker + 1], local_of(state))
    return with_local(state, local)


def _exchanged(between, states):
    """The states of all sites after an exchange; the messages travel as bytes."""
    (fragment,) = between.due(int(states[0].step))
    sent = [between.encode(fragment, state) for state in states]
    like = between.like(fragment, states[0])
    messages = [from_bytes(to_bytes(message), like) for message, _ in sent]
    return [between.merge(fragment, state, messages) for _, state in sent]


def _check_equal(found, wanted, rounding):
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for (path, want), got in zip(paths, jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            continue
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), rtol=0.0, atol=rounding, err_msg=name
        )


def _check_rounds(whole, alone, inner_state, rounding=0.0):
    """Sites against the workers of one program, over a few rounds.

    Args:
        whole: all workers in one program.
        alone: the worker of a site.
        inner_state: state before the first step.
        rounding: of parameters, where the program adds up in another order than sites do.
    """
    begun = whole.begin(inner_state)
    exchange = jax.jit(functools.partial(exchange_now, whole))
    between = BetweenJobs(alone)
    wanted, states = begun, [_one(begun, worker) for worker in range(WORKERS)]
    for number in range(ROUNDS):
        assert between.rounds_before(int(wanted.step)) == number
        wanted = _stepped(wanted, number)
        names = ("params", "past")
        states = [
            with_local(
                dataclasses.replace(state, step=wanted.step),
                dataclasses.replace(
                    local_of(state),
                    **{name: getattr(local_of(_one(wanted, worker)), name) for name in names},
                ),
            )
            for worker, state in enumerate(states)
        ]
        wanted, states = exchange(wanted), _exchanged(between, states)
        assert len({digest(state) for state in states}) == 1
        for worker, state in enumerate(states):
            names = ("params", "opt_state", "router_state", "step")
            for name in names:
                allowed = rounding if name in ("params", "opt_state") else 0.0
                _check_equal(getattr(state, name), getattr(wanted, name), allowed)
            mine = local_of(_one(wanted, worker))
            for name in ("params", "router_state", "talks"):
                allowed = rounding if name == "params" else 0.0
                _check_equal(getattr(local_of(state), name), getattr(mine, name), allowed)
    return wanted


@pytest.mark.parametrize(
    "config",
    [DiLoCoConfig(every=1), SparseConfig(every=1), SparseConfig(every=1, values="float32")],
    ids=("diloco", "sparse", "sparse_float32"),
)
def test_messages_between_jobs_equal_an_exchange_in_one_program(config):
    whole, alone = training_of(config), training_of(config, workers=1)
    # Compiled as one program or as two, a mean rounds differently on some processors.
    _check_rounds(whole, alone, new_state(parameters(), SGD), rounding=1e-6)


@pytest.mark.parametrize(
    ("config", "due", "rounds"),
    [
        (DiLoCoConfig(every=500), {5: [0]}, [0, 0, 0, 0, 0, 1]),
        (StreamingConfig(every=6, fragments=2, delay=0), {3: [0], 5: [0, 1]}, [0, 0, 0, 1, 1, 3]),
    ],
    ids=("shorter_than_a_round", "within_a_round"),
)
def test_sites_exchange_all_that_they_have_learnt_after_the_last_step(config, due, rounds):
    """A run has five steps, however its rounds divide them."""
    between = BetweenJobs(training_of(config, workers=1, steps=5))
    for step in range(1, 6):
        assert [part.number for part in between.due(step)] == due.get(step, [])
    assert [between.rounds_before(step) for step in range(6)] == rounds


@pytest.mark.slow
def test_routers_of_sites_equal_those_of_one_program():
    """A model whose experts have biases: statistics of all sites are added up and replayed."""
    moe = dataclasses.replace(MOE, **METHODS["loss_free"].parts())
    model, inner = dataclasses.replace(TINY, moe=moe), optax.sgd(0.1)
    step = Step(model=model, optimizer=inner)
    given = parameter_table(model), step, 10
    whole = WorkerTraining.of(DiLoCoConfig(every=1, workers=WORKERS), *given)
    alone = WorkerTraining.of(DiLoCoConfig(every=1), *given, site=2)
    assert alone.workers.number == 1 and alone.first_worker == 2
    state = state_around(model, inner, ExecutionConfig(), params_of(model), jax.random.key(0))
    state = _check_rounds(whole, alone, state, rounding=1e-6)
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(state.router_state))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            StreamingConfig(fragments=2),
            "replicas.delay=1: sites merge what they exchange at once; set replicas.delay to 0",
        ),
        (NoLoCoConfig(), "sites exchange means, and this method exchanges otherwise: choose"),
        (SparseConfig(reduce="senders"), "sites exchange means, and this method exchanges"),
    ],
    ids=("streaming", "noloco", "sparse_of_senders"),
)
def test_methods_without_means_at_once_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        BetweenJobs(training_of(config, workers=2))


def test_messages_with_numbers_that_are_not_finite_are_known():
    message = {"a": np.ones(3, np.float32), "codes": np.full(2, 255, np.uint8)}
    assert is_finite(message)
    for odd in (np.nan, np.inf):
        assert not is_finite(message | {"a": np.asarray([1.0, odd], np.float32)})


def test_bytes_hold_keys_and_those_of_another_length_are_refused():
    tree = {"a": np.arange(3, dtype=np.int8), "key": jax.random.key(3)}
    data = to_bytes(tree)
    for like in (tree, jax.eval_shape(lambda: tree)):
        found = from_bytes(data, like)
        np.testing.assert_array_equal(found["a"], tree["a"])
        assert found["key"] == tree["key"]
    with pytest.raises(ValueError, match="10 bytes do not hold 11 bytes of arrays"):
        from_bytes(data[:-1], tree)
