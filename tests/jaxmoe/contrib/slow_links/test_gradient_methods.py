# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of methods that exchange gradients, on a regression of four workers.

To add a method: a row in GRADIENT_METHODS.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.slow_links import CodedConfig, EControlConfig, OneBitAdamConfig, RobustConfig
from jaxmoe.contrib.slow_links.fragments import TrainingFacts
from jaxmoe.contrib.slow_links.methods.coded import cyclic_code
from jaxmoe.contrib.slow_links.methods.robust import flag_weights
from jaxmoe.contrib.slow_links.received_momentum import received_moments, received_momentum
from jaxmoe.optim import AdamWConfig, MuonConfig
from jaxmoe.training.replicas import REPLICAS
from tests.support import gradient_runs as gr
from tests.support import worker_runs as wr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a method promises."""

    degenerate: Any
    """Config with which it equals synchronous SGD."""
    usual: Any
    """Config for short runs."""
    has_same_rows: bool = False
    """Whether it equals synchronous SGD only for workers that see the same rows."""
    optimizer: Callable[[Any], Any] = lambda config: wr.SGD
    """Config -> optimiser."""
    inner: Any = wr.SGD
    """Optimiser of the synchronous steps."""


def adam(after):
    moments = received_momentum(after, beta1=0.9, beta2=0.95, epsilon=1e-2)
    return optax.chain(moments, optax.scale(-0.03))


GRADIENT_METHODS = {
    "coded": Row(degenerate=CodedConfig(), usual=CodedConfig(absent=2)),
    "econtrol": Row(degenerate=EControlConfig(share=1.0), usual=EControlConfig(tile=4)),
    "one_bit_adam": Row(
        degenerate=OneBitAdamConfig(freeze_share=1.0),
        usual=OneBitAdamConfig(),
        optimizer=lambda config: adam(config.updates_before(wr.STEPS)),
        inner=optax.adam(0.03, b2=0.95, eps=1e-2),
    ),
    "robust": Row(degenerate=RobustConfig(), usual=RobustConfig(rank=2), has_same_rows=True),
}


def run_of(name, **fields):
    row = GRADIENT_METHODS[name]
    return gr.Run(row.usual, optimizer=row.optimizer(row.usual), **fields)


def test_every_method_has_a_row():
    named = {name for name, config in REPLICAS.items() if config.exchanges == "gradients"}
    assert set(GRADIENT_METHODS) == named


@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_degenerate_settings_equal_synchronous_steps(name):
    row = GRADIENT_METHODS[name]
    optimizer = row.optimizer(row.degenerate)
    run = gr.Run(row.degenerate, optimizer=optimizer, has_same_rows=row.has_same_rows).go()
    with jax.numpy_dtype_promotion("standard"):
        wanted = wr.alone(0) if row.has_same_rows else wr.synchronous(inner=row.inner)
    assert wr.distance(run.params, wanted) < 1e-6


@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_restored_run_is_bitwise_the_same_and_a_broken_worker_is_left_out(name):
    run = run_of(name).go(7)
    kept = (run.params, run.opt_state, run.talk, run.number)
    run.go(3)
    first = run.params
    run.params, run.opt_state, run.talk, run.number = jax.tree.map(np.asarray, kept)
    run.go(3)
    assert wr.distance(first, run.params) == 0.0
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(run.params))

    before = jax.tree.map(lambda x: np.asarray(x)[1], run.talk.codec)
    run.go(5, broken=(1,))
    after = jax.tree.map(lambda x: np.asarray(x)[1], run.talk.codec)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))
    assert not np.asarray(run.counted)[1, 0]
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(run.params))
    run.step(broken=(0, 1, 2, 3))
    assert all(np.isnan(np.asarray(x)).all() for x in jax.tree.leaves(run.mixed))


@pytest.mark.parametrize("name", GRADIENT_METHODS)
def test_bits_of_the_payload_are_those_of_the_codec(name):
    run = run_of(name)
    total = 0
    for leaf in wr.LEAVES:
        codec, x = run.method.codec(leaf, None), run.params[leaf.path]
        payload, _ = codec.encode(x, codec.init(x), jax.random.key(0))
        total += codec.bits(leaf.shape)
        sizes = [8 * part.size * part.dtype.itemsize for part in jax.tree.leaves(payload)]
        assert sum(sizes) == codec.bits(leaf.shape)
    copies = run.method.exchange.copies(4)
    assert run.method.step_bytes(list(gr.BY_PATH.values()), 4) == copies * total / 8


def test_errors_of_econtrol_telescope():
    """After T steps the error is the sum of gradient - sent, and receivers hold the mean of h."""
    with jax.enable_x64(True):
        run = gr.Run(EControlConfig(tile=4), params=wr.parameters(jnp.float64))
        left: Any = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), run.params)
        for _ in range(8):
            grads = run.step()
            held = {path: state[1] for path, state in run.talk.codec.items()}
            left = jax.tree.map(lambda e, g, h: e + g - h, left, grads, held)
        # The error of a step has the increment sent in it: e_T = sum of (g_t - h_(t+1)).
        errors = {path: state[0] for path, state in run.talk.codec.items()}
        assert wr.distance(errors, left) < 1e-12
        mean = jax.tree.map(lambda h: jnp.mean(h, axis=0), held)
        assert wr.distance(run.mixed, mean) < 1e-12
        assert wr.spread(run.talk.exchange) == 0.0


def test_one_bit_adam_equals_loops_over_workers_and_its_errors_telescope():
    """Two phases by hand in f64: messages, both errors and the update of every step."""
    with jax.enable_x64(True):
        config = OneBitAdamConfig(freeze_share=0.5)
        params = wr.parameters(jnp.float64)
        run = gr.Run(config, optimizer=adam(4), params=params, steps=8)
        run.go(4)
        moments = received_moments(run.opt_state)
        agreed: Any = jax.tree.map(np.asarray, moments.mu)
        nu: Any = jax.tree.map(np.asarray, moments.nu)
        zeros = {leaf.path: np.zeros(leaf.shape) for leaf in wr.LEAVES}
        own, second = [dict(zeros) for _ in range(4)], dict(zeros)
        messages, results = dict(zeros), dict(zeros)

        def signed(z, leaf):
            if leaf.role == "norm":
                return z
            axes = (2, 3) if leaf.is_stacked else (0, 1)
            return np.sqrt((z**2).mean(axis=axes, keepdims=True)) * np.where(z >= 0, 1.0, -1.0)

        for step in range(5, 9):
            before = jax.tree.map(np.asarray, run.params)
            grads = jax.tree.map(np.asarray, run.step())
            for leaf in wr.LEAVES:
                path = leaf.path
                wanted = [0.9 * agreed[path] + 0.1 * grads[path][w] for w in range(4)]
                messages[path] = messages[path] + sum(wanted) / 4
                wanted = [z + own[w][path] for w, z in enumerate(wanted)]
                sent = [signed(z, leaf) for z in wanted]
                for w in range(4):
                    own[w][path] = wanted[w] - sent[w]
                mean = sum(sent) / 4 + second[path]
                agreed[path] = signed(mean, leaf)
                second[path] = mean - agreed[path]
                results[path] = results[path] + agreed[path]
                root = np.sqrt(nu[path] / (1 - 0.95**4)) + 1e-2
                after = before[path] - 0.03 * agreed[path] / (1 - 0.9**step) / root
                np.testing.assert_allclose(run.params[path], after, rtol=1e-5, atol=1e-7)
        assert wr.distance(run.mixed, agreed) < 1e-12
        matrices = {path: run.talk.codec[path][0] for path in ("a", "experts")}
        stacked = {path: np.stack([e[path] for e in own]) for path in matrices}
        assert wr.distance(matrices, stacked) < 1e-12
        # Each worker holds its part of the second error, and 0 elsewhere.
        parts = {path: jnp.sum(run.talk.exchange[path], axis=0) for path in matrices}
        assert wr.distance(parts, {path: second[path] for path in matrices}) < 1e-12
        left = {p: jnp.mean(matrices[p], axis=0) + parts[p] + results[p] for p in matrices}
        assert wr.distance(left, {path: messages[path] for path in matrices}) < 1e-12


def test_one_bit_adam_neither_sends_nor_changes_numbers_without_second_moment():
    run = run_of("one_bit_adam")
    masked = run.method.agreed
    hidden = {p: jnp.arange(x.size).reshape(x.shape) % 3 > 0 for p, x in run.params.items()}

    def agreed(opt_state):
        known = masked(opt_state)
        momentum = {p: jnp.where(hidden[p], x, 0.0) for p, x in known.momentum.items()}
        return known._replace(mask=hidden, momentum=momentum)

    run.method = dataclasses.replace(run.method, agreed=agreed)
    run.go()
    for path, x in run.mixed.items():
        is_zero = np.asarray(x) == 0.0
        assert (is_zero == ~np.asarray(hidden[path])).all()
        if path != "b":
            assert not np.asarray(run.talk.codec[path][0])[:, is_zero].any()


def test_one_bit_adam_sends_a_sixteenth_of_an_all_reduce():
    leaf = gr.BY_PATH["a"]._replace(path="large", shape=(512, 1024))
    method = OneBitAdamConfig().build(TrainingFacts([leaf], 8, 100))
    numbers = 512 * 1024
    assert method.codec(leaf, None).bits(leaf.shape) == numbers + 32
    # An all-reduce of f32 sends 2 (R - 1) / R times 32 bits a number.
    assert method.step_bytes([leaf], 8) == 2 * 7 / 8 * (numbers + 32) / 8


def test_one_bit_adam_needs_adamw_with_the_same_momentum():
    config = OneBitAdamConfig()
    with pytest.raises(ValueError, match="choose optimizer:adamw"):
        config.adapt(MuonConfig(), 100)
    with pytest.raises(ValueError, match=r"optimizer.beta1=0.8 .* replicas.momentum=0.9"):
        config.adapt(AdamWConfig(beta1=0.8), 100)


@pytest.mark.parametrize(("attack", "least"), [("reversed", 0.99), ("random", 0.95)])
def test_robust_mean_withstands_three_hostile_workers_of_fourteen(attack, least):
    rng = np.random.default_rng(3)
    truth = rng.standard_normal(400)
    grads = truth + 0.3 * rng.standard_normal((14, 400))
    grads[:3] = -4.0 * grads[:3] if attack == "reversed" else 30.0 * rng.standard_normal((3, 400))

    def cosine(weights):
        mean = weights @ grads
        return mean @ truth / np.linalg.norm(mean) / np.linalg.norm(truth)

    gram = jnp.asarray(grads @ grads.T, jnp.float32)
    weights = np.asarray(flag_weights(gram, jnp.ones((14,), bool), 4, 3))
    assert cosine(weights) > least
    assert cosine(np.ones(14) / 14) < 0.3
    norms = np.linalg.norm(grads, axis=1)
    np.testing.assert_allclose(np.linalg.norm(weights @ grads), np.median(norms), rtol=1e-5)


def test_robust_mean_of_full_rank_has_the_direction_of_the_unit_gradients_sum():
    grads = np.random.default_rng(4).standard_normal((5, 60))
    gram = jnp.asarray(grads @ grads.T, jnp.float32)
    weights = np.asarray(flag_weights(gram, jnp.ones((5,), bool), 5, 3))
    norms = np.linalg.norm(grads, axis=1)
    wanted = (grads / norms[:, None]).sum(0)
    wanted *= np.median(norms) / np.linalg.norm(wanted)
    np.testing.assert_allclose(weights @ grads, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("workers", "absent"), [(2, 1), (4, 0), (4, 2), (5, 4), (7, 3), (16, 2)])
def test_every_set_of_absent_workers_is_decoded(workers, absent):
    code = cyclic_code(workers, absent)
    messages = np.zeros((workers, workers))
    for worker in range(workers):
        messages[worker, (worker + np.arange(absent + 1)) % workers] = code.factors[worker]
    missing = {tuple(np.flatnonzero(~alive)) for alive in code.alive}
    wanted = [itertools.combinations(range(workers), count) for count in range(absent + 1)]
    assert missing == set(itertools.chain(*wanted))
    assert not code.weights[~code.alive].any()
    np.testing.assert_allclose(code.weights @ messages, 1.0, atol=1e-9)


def test_coded_steps_equal_synchronous_ones_whoever_is_absent():
    run = gr.Run(CodedConfig(absent=2))
    for dead in [(), (0,), (3,), (0, 1), (1, 3), (2, 3), (0, 2), (), (1,), (2,), (1, 2), (0, 3)]:
        run.step(dead=dead)
        counted = np.asarray(run.counted)
        # Each part counts once, at the first worker that has it and answers.
        parts = (np.arange(4)[:, None] + np.arange(3)) % 4
        assert sorted(parts[counted].tolist()) == [0, 1, 2, 3]
        assert not counted[list(dead)].any()
    assert wr.distance(run.params, wr.synchronous()) < 1e-5
    run.step(dead=(0, 1, 2))
    assert all(np.isnan(np.asarray(x)).all() for x in jax.tree.leaves(run.mixed))


def test_codes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"replicas.absent=4 must be below .* 4"):
        cyclic_code(4, 4)
    with pytest.raises(ValueError, match="choose a smaller replicas.absent"):
        cyclic_code(64, 8)
