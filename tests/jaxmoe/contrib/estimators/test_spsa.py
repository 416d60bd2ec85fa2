# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Derivatives along random directions: the rule, the model's passes, and workers on meshes."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.contrib.estimators.passes import Given
from jaxmoe.contrib.estimators.spsa import (
    SPSAConfig,
    direction_keys,
    exchange_derivatives,
    slopes_of,
)
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.estimators import estimated, noise_of, state_of, step_of
from tests.support.meshes import mesh_of
from tests.support.models import TINY
from tests.support.one_step import batch, params_of

DENSE = dataclasses.replace(TINY, moe=None, dense_layers=(), dense_dim=12)


def _dot(one, other):
    return sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), one, other)))


def _keys(number):
    """Keys of the directions of the first step of the states of these tests."""
    given = Given(
        params=None,
        router_state=None,
        key=jax.random.key_data(jax.random.fold_in(jax.random.key(0), 0)),
        parts=None,
        total_weight=None,
    )
    return direction_keys(given, jnp.arange(number))


def _largest(one, other):
    apart = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b), initial=0.0)), one, other)
    return max(jax.tree.leaves(apart))


def test_derivative_of_a_quadratic_is_exact():
    """No third derivative: the difference quotient is z . gradient for every distance."""
    params, z = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        for tree in (params_of(DENSE), noise_of(DENSE, jax.random.key(3)))
    )
    gradient = jax.tree.map(lambda p: 0.5 * p - 0.1, params)

    def loss(scale):
        apart = jax.tree.map(lambda g, n: g + scale * n, gradient, z)
        return 0.5 * sum(np.sum(x * x) for x in jax.tree.leaves(apart))

    epsilon = 0.25
    totals = np.asarray([[loss(epsilon), loss(-epsilon)]]) - loss(0.0)
    slope = slopes_of(jnp.asarray(totals, jnp.float32), epsilon)[0]
    expected = sum(jax.tree.leaves(jax.tree.map(lambda n, g: np.sum(n * g), z, gradient)))
    np.testing.assert_allclose(slope, expected, rtol=3e-5)


def test_mean_of_slope_times_noise_is_the_gradient():
    """The relative error over n directions is sqrt((d + 1) / n) in the mean."""
    model = ModelConfig(vocab_size=8, num_layers=1, embed_dim=4, moe=None, dense_dim=4)
    table, n = parameter_table(model), 4000
    gradient = jax.tree.map(jnp.cos, params_of(model))
    keys = jax.random.split(jax.random.key(1), n)

    @jax.jit
    def mean(keys):
        slopes = jax.lax.map(lambda key: _dot(noise_of(model, key), gradient), keys)
        return noise_sum(table, gradient, keys, slopes / n)

    apart = jax.tree.map(jnp.subtract, mean(keys), gradient)
    error = np.sqrt(float(_dot(apart, apart) / _dot(gradient, gradient)))
    expected = np.sqrt((table.total + 1) / n)
    assert 0.8 * expected < error < 1.2 * expected


def test_noise_differs_by_path_layer_and_key():
    one, other = (noise_of(TINY, jax.random.key(seed)) for seed in (0, 1))
    leaves = jax.tree.leaves(one)
    values = np.concatenate([np.ravel(leaf) for leaf in leaves])
    assert len(np.unique(values)) > 0.999 * values.size
    assert abs(values.mean()) < 0.05 and abs(values.std() - 1.0) < 0.05
    assert _largest(one, other) > 1.0


@pytest.mark.slow
def test_step_of_the_model_equals_dense_perturbation():
    """Passes through the view against parameters that are perturbed as a whole."""
    config, step = SPSAConfig(directions=2), step_of(TINY)
    found = estimated(config, step, state_of(TINY))
    slopes, losses = [], []

    @jax.jit
    def loss(params):
        state = dataclasses.replace(state_of(TINY), params=params)
        _, summed = batch_gradients(step, state, jax.tree.map(jnp.asarray, batch()))
        return summed.loss, summed.loss + sum(summed.losses.values())

    for key in _keys(2):
        z = noise_of(TINY, key)
        ends = [
            loss(jax.tree.map(lambda p, n, s=sign: p + s * 1e-3 * n, params_of(TINY), z))
            for sign in (1.0, -1.0)
        ]
        losses += [end[0] for end in ends]
        slopes.append((ends[0][1] - ends[1][1]) / 2e-3)
    grads = noise_sum(parameter_table(TINY), params_of(TINY), _keys(2), jnp.stack(slopes) / 2)
    np.testing.assert_allclose(found.summed.loss, np.mean(losses), rtol=1e-6)
    # Two losses of 3.5 that differ by 1e-3: rounding to f32 leaves 3e-4 of the slope.
    assert _largest(found.summed.grads, grads) < 2e-3
    assert found.summed.statistics is not None
    tokens = np.sum(batch().segment_ids != 0)
    np.testing.assert_array_equal(np.sum(found.summed.statistics.counts, -1), [2 * tokens] * 2)


@pytest.mark.large
def test_clip_limits_each_derivative():
    free = estimated(SPSAConfig(), step_of(DENSE), state_of(DENSE)).summed.grads
    limit = 0.01
    held = estimated(SPSAConfig(), step_of(DENSE, clip=limit), state_of(DENSE)).summed.grads
    z = noise_of(DENSE, _keys(1)[0])
    slope = float(free["head"]["weight"][0, 0] / z["head"]["weight"][0, 0])
    assert abs(slope) > limit
    expected = jax.tree.map(lambda n: np.sign(slope) * limit * n, z)
    assert _largest(held, expected) < 1e-7


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(replica=2, data=2), marks=pytest.mark.slow),
        pytest.param(MeshConfig(replica=4, data=1), marks=pytest.mark.large),
        pytest.param(MeshConfig(replica=1, data=4), marks=pytest.mark.large),
        pytest.param(MeshConfig(replica=2, data=1, expert=2, tensor=2), marks=pytest.mark.large),
    ],
    ids=str,
)
def test_every_mesh_equals_one_device(mesh):
    """A mesh with an even number of replicas has each half compute one end."""
    config = SPSAConfig(directions=2, epsilon=0.1)
    one = estimated(config, step_of(TINY), state_of(TINY))
    several = estimated(config, step_of(TINY, mesh), state_of(TINY))
    np.testing.assert_allclose(several.summed.loss, one.summed.loss, rtol=1e-6)
    # The slope is a difference of losses of 3.5, known to 1e-6, over 0.2.
    assert _largest(several.summed.grads, one.summed.grads) < 5e-5
    np.testing.assert_allclose(
        several.summed.statistics.counts, one.summed.statistics.counts, atol=1.0
    )


@pytest.mark.large
def test_accumulation_equals_one_pass():
    config = SPSAConfig(epsilon=0.1)
    one = estimated(config, step_of(TINY), state_of(TINY))
    parts = estimated(config, step_of(TINY, accumulation=4), state_of(TINY))
    np.testing.assert_allclose(parts.summed.loss, one.summed.loss, rtol=1e-6)
    assert _largest(parts.summed.grads, one.summed.grads) < 5e-5


@pytest.mark.large
def test_one_worker_with_its_own_noise_equals_plain_spsa():
    plain, own = (
        estimated(SPSAConfig(directions=2, payload=payload), step_of(TINY), state_of(TINY))
        for payload in ("mean", "float32")
    )
    assert _largest(plain.summed.grads, own.summed.grads) == 0.0


def test_byte_payload_rounds_to_the_shared_scale():
    slopes = jnp.asarray([3.0, -1.27, 0.004, 0.0])
    found = exchange_derivatives(slopes, "byte", 1)[:, 0]
    assert float(jnp.max(jnp.abs(found - slopes))) <= 0.5 * 3.0 / 127 + 1e-7
    assert (
        found[0] == pytest.approx(3.0) and not exchange_derivatives(jnp.zeros(2), "byte", 1).any()
    )


def _sent(text, name):
    """Dtype and number of values of each collective of this name between several devices."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (\w+)\[([\d,]*)\]\S* {name}\(", line)
        is_alone = re.search(r"replica_groups=\{(\{\d+\},?)+\}", line)
        if match and not is_alone:
            found.append((match[1], math.prod(int(n) for n in match[2].split(",") if n)))
    return found


@pytest.mark.slow
def test_workers_send_one_byte_each_and_stay_equal():
    """Two workers: the gradient is the sum of p z over workers and directions, equal on both."""
    mesh, directions = MeshConfig(replica=2, data=2), 3
    config, table = SPSAConfig(directions=directions, payload="byte"), parameter_table(TINY)
    execution = ExecutionConfig(mesh=mesh, rules="data_parallel")
    step = Step(
        model=TINY, optimizer=optax.sgd(1e-3), execution=execution, table=table, gradients=config
    )
    made = mesh_of(execution)
    state = init_state(TINY, optax.sgd(1e-3), jax.random.key(0), execution=execution, mesh=made)
    with jax.set_mesh(made):
        rows = global_batch(batch(), made)
        compiled = step.jit_step().lower(state, rows).compile()
        text = compiled.as_text()
        state, metrics = compiled(state, rows)
    assert not metrics.is_skipped
    sent = _sent(text, "all-gather")
    assert sent == [("s8", 2 * directions)], sent
    # The largest derivative, and sums of losses and statistics: no parameter is reduced.
    assert all(size <= 64 for _, size in _sent(text, "all-reduce"))
    for leaf in jax.tree.leaves(state.params):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.slow
def test_estimate_needs_the_memory_of_a_few_layers_beside_the_gradient():
    """A pass holds the parameters, noise, random bits and sums of one layer, and activations."""
    model, optimizer = (
        dataclasses.replace(DENSE, num_layers=16, embed_dim=64, dense_dim=256),
        optax.sgd(1e-3),
    )
    table, rows = parameter_table(model), batch()
    step = Step(model=model, optimizer=optimizer, table=table, gradients=SPSAConfig())
    state = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))

    def temp(function, **given):
        compiled = jax.jit(function, **given).lower(state).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def grads(state):
        return SPSAConfig().compute(step, state, rows).summed.grads

    whole = 4 * table.total
    layer = sum(4 * row.size // row.shape[0] for row in table if row.declaration.is_stacked)
    passes = temp(lambda state: SPSAConfig().compute(step, state, rows).summed.loss)
    assert passes < 6 * layer < 0.4 * whole
    updated = temp(lambda state: jax.tree.map(lambda p, g: p - g, state.params, grads(state)))
    assert updated < whole + 6 * layer
    # The guard holds the new parameters beside the old ones until it has judged them.
    assert temp(lambda state: step(state, rows)[:2], donate_argnums=0) < 2.75 * whole


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"directions": 0}, r"training.gradients.directions=0 must be at least 1"),
        ({"epsilon": 0.0}, r"training.gradients.epsilon=0.0 must be above 0"),
    ],
)
def test_wrong_numbers_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        SPSAConfig(**given)


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (ExecutionConfig(mesh=MeshConfig(stage=2)), r"execution.mesh.stage=2 is one"),
        (ExecutionConfig(mesh=MeshConfig(), rules="zero2"), r"execution.rules=zero2 gathers"),
        (
            ExecutionConfig(mesh=MeshConfig(replica=2), rules="hybrid"),
            r"execution.rules=hybrid cuts them over replicas",
        ),
        (
            ExecutionConfig(mesh=MeshConfig(), telemetry="detailed"),
            r"telemetry to brief",
        ),
    ],
)
def test_executions_without_a_forward_pass_are_refused(execution, text):
    with pytest.raises(ValueError, match=text):
        Step(model=TINY, optimizer=optax.sgd(1.0), execution=execution, gradients=SPSAConfig())
