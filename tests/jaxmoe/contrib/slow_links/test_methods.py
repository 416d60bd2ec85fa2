# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of methods of low-communication training, on a regression of four workers.

To add a method: a row in METHODS.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import (
    A2cid2Config,
    CO2Config,
    DiLoCoConfig,
    HeterogeneousConfig,
    NoLoCoConfig,
    SingleMergeConfig,
    SparseConfig,
    SpesConfig,
    StreamingConfig,
)
from jaxmoe.contrib.slow_links.cost import cost
from jaxmoe.contrib.slow_links.timing import ExchangeTiming
from jaxmoe.contrib.slow_links.workers.local import local_of
from jaxmoe.training.replicas import REPLICAS
from tests.support import worker_runs as wr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a method promises."""

    degenerate: object
    """Config with which it equals synchronous SGD."""
    expected: object = wr.synchronous
    """Synchronous steps that it equals."""
    usual: object
    """Config for short runs, with which fragments are under way after `saved_at` steps if the
    method has a delay."""
    workers: int = 4
    """Workers of the degenerate run."""
    is_equal_after: tuple[int, ...] = ()
    """Steps after which all workers have bitwise equal parameters."""
    alone: object = None
    """Config with which workers never mix; None if there is none."""
    saved_at: int = 5
    """Step at which the state is saved and restored."""


METHODS = {
    "a2cid2": Row(
        degenerate=A2cid2Config(every=1, gossip="none"),
        workers=2,
        usual=A2cid2Config(every=2),
    ),
    "diloco": Row(
        degenerate=DiLoCoConfig(every=1, learning_rate=1.0, momentum=0.0),
        usual=DiLoCoConfig(every=3),
        is_equal_after=(3, 6, 9, 12),
    ),
    "streaming": Row(
        degenerate=StreamingConfig(
            **dict(every=1, fragments=1, delay=0, keep=0.0),
            **dict(codec="float32", learning_rate=1.0, momentum=0.0),
        ),
        usual=StreamingConfig(every=4, fragments=2, delay=3),
        alone=StreamingConfig(every=4, fragments=2, delay=3, keep=1.0),
    ),
    "sparse": Row(
        degenerate=SparseConfig(every=1, kept=4096, values="float32"),
        usual=SparseConfig(every=3, kept=1024),
        is_equal_after=(3, 6, 9, 12),
    ),
    "heterogeneous": Row(
        degenerate=HeterogeneousConfig(
            every=1, kept=4096, values="float32", slow=(1, 2), slow_kept=4096
        ),
        usual=HeterogeneousConfig(every=3, kept=1024, slow=(0, 2), slow_kept=256),
        is_equal_after=(3, 6, 9, 12),
    ),
    "noloco": Row(
        degenerate=NoLoCoConfig(every=1, learning_rate=1.0, momentum=0.0),
        workers=2,
        usual=NoLoCoConfig(every=3),
    ),
    "co2": Row(
        degenerate=CO2Config(every=1, delay=0, momentum=0.0, clip=None),
        usual=CO2Config(every=3),
    ),
    "single_merge": Row(
        degenerate=SingleMergeConfig(every=1, complete_from=0.0),
        usual=SingleMergeConfig(every=3, peers=0.5),
        alone=SingleMergeConfig(every=3, peers=0.0, complete_from=1.0),
        is_equal_after=(12,),
    ),
    "spes": Row(
        degenerate=SpesConfig(every=1, merging=0.0),
        expected=functools.partial(wr.synchronous, owned="experts"),
        usual=SpesConfig(every=3, merging=0.1, merging_every=6, merging_steps=10),
        is_equal_after=(3, 6, 9, 12),
    ),
}


@functools.cache
def usual_run(name):
    """Parameters of the workers after every step of the usual run, and the saved state."""
    params, saved = [], []

    def watch(state):
        params.append(jax.tree.map(np.asarray, local_of(state).params))
        if len(params) == METHODS[name].saved_at:
            saved.append(jax.tree.map(to_numpy, state))

    wr.train(METHODS[name].usual, inner=optax.adam(0.03), watch=watch)
    return params, saved[0]


def to_numpy(x):
    return ("key", np.asarray(jax.random.key_data(x))) if is_key(x) else np.asarray(x)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def test_every_method_has_a_row():
    named = {name for name, config in REPLICAS.items() if config.exchanges == "parameters"}
    assert set(METHODS) == named


@pytest.mark.parametrize("name", METHODS)
def test_degenerate_settings_equal_synchronous_steps(name):
    row = METHODS[name]
    state = wr.train(row.degenerate, workers=row.workers)
    expected = row.expected(workers=row.workers)
    assert wr.spread(local_of(state).params) < 1e-6
    assert wr.distance(jax.tree.map(lambda x: x[0], local_of(state).params), expected) < 1e-6
    if wr.training_of(row.degenerate).method.is_shared:
        assert wr.distance(state.params, expected) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_workers_are_bitwise_equal_after_an_exchange(name):
    spreads = {step: wr.spread(params) for step, params in enumerate(usual_run(name)[0], 1)}
    equal = {step for step, value in spreads.items() if value == 0.0}
    assert equal >= set(METHODS[name].is_equal_after)
    assert len(equal) < wr.STEPS / 2
    assert np.isfinite(list(spreads.values())).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_goes_on_bitwise(name):
    params, saved = usual_run(name)
    restored = jax.tree.map(
        lambda x: jax.random.wrap_key_data(x[1]) if isinstance(x, tuple) else x,
        saved,
        is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str),
    )
    seen = []
    wr.train(
        METHODS[name].usual,
        inner=optax.adam(0.03),
        state=restored,
        watch=lambda state: seen.append(local_of(state).params),
    )
    assert wr.distance(seen, params[METHODS[name].saved_at :]) == 0.0


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.alone])
def test_workers_that_never_mix_equal_local_training(name):
    steps = METHODS[name].saved_at
    state = wr.train(METHODS[name].alone, run=wr.STEPS, steps=steps)
    for worker in range(wr.WORKERS):
        own = jax.tree.map(lambda x, worker=worker: x[worker], local_of(state).params)
        assert wr.distance(own, wr.alone(worker, steps=steps)) < 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_payloads_have_the_bits_of_their_codec(name):
    training = wr.training_of(METHODS[name].usual)
    for fragment in training.fragments:
        for path, x in fragment.take(wr.parameters()).items():
            codec = training.method.codec(training.leaves[path])
            payload, _ = jax.eval_shape(codec.encode, x, codec.init(x), jax.random.key(0))
            size = sum(part.size * part.dtype.itemsize for part in jax.tree.leaves(payload))
            assert 8 * size == codec.bits(x.shape)
    method = METHODS[name].usual.build(wr.facts())
    bill = cost(method, wr.LEAVES, wr.WORKERS)
    assert bill.step * method.timing.every == pytest.approx(sum(bill.exchanges))


def longer_than_the_run(config):
    """The config with more steps between exchanges than a run of the tests has."""
    more = {"merging_every": 500} if hasattr(config, "merging_every") else {}
    return dataclasses.replace(config, every=500, **more)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_shorter_than_a_round_ends_with_an_exchange(name):
    """Workers that would never exchange otherwise: the world sees what they have learnt."""
    config, seen = longer_than_the_run(METHODS[name].usual), []
    state = wr.train(config, steps=5, watch=seen.append)
    training = wr.training_of(config, steps=5)
    assert wr.distance(seen[3].params, wr.parameters()) == 0.0
    if training.method.is_shared:
        assert wr.distance(state.params, wr.parameters()) > 0.01
    alone = jax.tree.map(lambda *own: jnp.stack(own), *(wr.alone(w, steps=5) for w in range(4)))
    assert wr.spread(local_of(state).params) < 0.9 * wr.spread(alone)
    bill = cost(training.method, wr.LEAVES, wr.WORKERS)
    assert 5 * bill.step == pytest.approx(sum(bill.exchanges))


def test_the_exchange_after_the_last_step_is_that_of_diloco_and_a_longer_run_goes_on():
    """Five steps of rounds of three, and four more: exchanges after 3, 5, 6 and 9."""
    outer, config = optax.sgd(0.7, 0.9, nesterov=True), DiLoCoConfig(every=3)
    slow = wr.parameters()
    workers, outer_state, ends = [slow] * 4, outer.init(slow), {}
    moments = [wr.SGD.init(slow)] * 4
    for step in range(9):
        for w in range(4):
            workers[w], moments[w] = wr.own_step(wr.SGD, workers[w], moments[w], w, step)
        if step + 1 in (3, 5, 6, 9):
            delta = jax.tree.map(lambda s, *w: s - sum(w) / 4, slow, *workers)
            updates, outer_state = outer.update(delta, outer_state, slow)
            slow = optax.apply_updates(slow, updates)
            workers, ends[step + 1] = [slow] * 4, slow
    short = wr.train(config, steps=5)
    assert wr.distance(short.params, ends[5]) < 1e-6
    assert wr.distance(wr.train(config, steps=9, state=short).params, ends[9]) < 1e-6


def test_a_message_merged_after_the_last_step_is_not_merged_again():
    config = StreamingConfig(every=4, fragments=2, delay=3)
    short = wr.train(config, steps=5)
    # Fragment 0 was sent after step 2 and merged before step 6; fragment 1 after step 4.
    assert [int(arrived.last) for arrived in local_of(short).arrived] == [0, 0]
    still = wr.train(config, steps=6, state=short, inner=optax.sgd(0.0), run=20)
    assert wr.distance(still.params, short.params) == 0.0


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("last", [2, 6, 7, 20])
def test_exchanges_of_a_run_are_counted_with_the_last(every, delay, last):
    timing = ExchangeTiming(every=every, fragments=min(every, 2), delay=delay, last=last)
    for part in range(timing.fragments):
        sent = [step for step in range(last) if timing.sends(part, step)]
        assert [timing.round(part, step) for step in sent] == list(range(len(sent)))
        assert timing.round(part, last) == len(sent)
        assert timing.exchanges_a_step(part) == pytest.approx((len(sent) + 1) / last)
        assert timing.is_under_way(part) == bool(sent and sent[-1] + delay >= last)


def test_diloco_equals_two_loops():
    inner, outer = optax.adam(0.03), optax.sgd(0.7, 0.9, nesterov=True)
    state = wr.train(DiLoCoConfig(every=3), inner=inner, steps=9)
    slow = wr.parameters()
    workers: list = [slow] * 4
    moments, outer_state = [inner.init(slow)] * 4, outer.init(slow)
    for step in range(9):
        for w in range(4):
            workers[w], moments[w] = wr.own_step(inner, workers[w], moments[w], w, step)
        if (step + 1) % 3 == 0:
            delta = jax.tree.map(lambda s, *w: s - sum(w) / 4, slow, *workers)
            updates, outer_state = outer.update(delta, outer_state, slow)
            slow = optax.apply_updates(slow, updates)
            workers = [slow] * 4
    assert wr.distance(state.params, slow) < 1e-6
    assert np.isfinite(np.asarray(local_of(state).spread)).all()


def test_streaming_without_its_own_options_is_diloco():
    config = StreamingConfig(
        **dict(every=3, fragments=1, delay=0, keep=0.0),
        **dict(codec="float32", learning_rate=0.7, momentum=0.9),
    )
    states = [wr.train(one) for one in (config, DiLoCoConfig(every=3))]
    assert wr.distance(local_of(states[0]).params, local_of(states[1]).params) == 0.0


def test_streaming_sends_every_number_once_in_a_period():
    config = StreamingConfig(every=8, fragments=2, codec="float32")
    method, total = config.build(wr.facts()), sum(np.prod(leaf.shape) for leaf in wr.LEAVES)
    bill = cost(method, wr.LEAVES, workers=4)
    assert sum(bill.exchanges) == 4 * total * 2 * 3 / 4
    assert bill.peak == max(bill.exchanges) < sum(bill.exchanges)
    steps = range(8, 16)
    sends = [sum(bool(method.timing.sends(f, step)) for step in steps) for f in range(2)]
    assert sends == [1, 1]
    marked = {leaf.path: np.arange(leaf.shape[0]) for leaf in wr.LEAVES if leaf.is_stacked}
    for fragment in method.fragments(wr.LEAVES):
        layers = {path: marked[path][fragment.number :: 2] for path in fragment.strided}
        whole = {path: np.zeros(1) for path in fragment.whole_paths}
        taken = fragment.take({k: jax.numpy.asarray(v) for k, v in (marked | whole).items()})
        assert all((taken[path] == layers[path]).all() for path in fragment.strided)
