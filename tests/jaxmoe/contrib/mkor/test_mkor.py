# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Inverse factors against dense inverses, and probes against explicit means, on meshes too."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.catalog import choice
from jaxmoe.contrib.mkor.backward import ProbedBackward
from jaxmoe.contrib.mkor.optimizer import MKORConfig, directions, scale_by_mkor, update_factors
from jaxmoe.contrib.mkor.probed import ProbedArray, means
from jaxmoe.contrib.mkor.probes import mean_gradients, mean_inputs, probed_rows
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import AttentionConfig, ModelConfig
from jaxmoe.optim import AdamWConfig, LinearConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.estimators.backward import backward_of
from jaxmoe.training.gradients import MicroBatchBackward, batch_gradients
from jaxmoe.training.state import init_state
from jaxmoe.training.step import Step, make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.estimators import state_of
from tests.support.meshes import mesh_of
from tests.support.models import FULL, TINY
from tests.support.one_step import batch, params_of

SCHEDULE = LinearConfig().build(10)


def _random(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def test_inverse_of_the_average_is_exact_and_positive():
    size, decay = 6, 0.9
    inverse, average = jnp.eye(size)[None], np.eye(size)
    for step in range(20):
        mean = _random((1, size), step)
        inverse = update_factors(inverse, mean, decay, largest=1e9)
        v = np.asarray(mean[0], np.float64)
        average = decay * average + (1 - decay) * np.outer(v, v)
    np.testing.assert_allclose(inverse[0], np.linalg.inv(average), rtol=1e-3, atol=1e-4)
    assert np.linalg.eigvalsh(np.asarray(inverse[0])).min() > 0.0


def test_large_factors_move_to_the_identity():
    inverse = 3.0 * jnp.eye(4)[None]
    found = update_factors(inverse, jnp.zeros((1, 4)), 0.95, largest=2.0)
    np.testing.assert_allclose(found[0], (0.9 * 3.0 / 0.95 + 0.1) * np.eye(4), rtol=1e-6)
    small = update_factors(jnp.eye(4)[None], jnp.zeros((1, 4)), 0.95, largest=2.0)
    np.testing.assert_allclose(small[0], np.eye(4) / 0.95, rtol=1e-6)


def test_direction_is_the_gradient_between_the_factors_with_its_norm():
    gradient = _random((2, 3, 2, 4), 0)
    inputs, outputs = (
        x @ jnp.swapaxes(x, 1, 2) for x in (_random((2, 3, 3), 1), _random((2, 8, 8), 2))
    )
    found = directions(gradient, inputs, outputs, ((-3,), (-2, -1)))
    for layer in range(2):
        dense = inputs[layer] @ gradient[layer].reshape(3, 8) @ outputs[layer]
        dense *= jnp.linalg.norm(gradient[layer]) / jnp.linalg.norm(dense)
        np.testing.assert_allclose(found[layer].reshape(3, 8), dense, rtol=1e-4, atol=1e-5)
    units = jnp.eye(3)[None].repeat(2, 0), jnp.eye(8)[None].repeat(2, 0)
    same = directions(gradient, *units, ((-3,), (-2, -1)))
    np.testing.assert_allclose(same, gradient, rtol=1e-6)


def test_probes_change_no_value_and_measure_sums():
    x, w = _random((5, 7, 3), 0), _random((3, 4), 1)
    zeros = jnp.zeros((2, 3)), jnp.zeros((2, 4))

    def loss(w, probes, x):
        weight = ProbedArray(values=w, inputs=probes[0], outputs=probes[1])
        return jnp.sum(jnp.tanh(weight.multiply(jnp.matmul, x)) ** 2)

    plain = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    value, (grad, probes) = jax.value_and_grad(loss, (0, 1))(w, zeros, x)
    np.testing.assert_array_equal(value, plain[0])
    np.testing.assert_array_equal(grad, plain[1])
    y = jax.grad(lambda y: jnp.sum(jnp.tanh(y) ** 2))(x @ w)
    np.testing.assert_allclose(probes[0], [x.sum((0, 1)), np.full(3, 35)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(probes[1], [y.sum((0, 1)), np.full(4, 35)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(means(probes[0]), x.mean((0, 1)), rtol=1e-5, atol=1e-6)


@functools.cache
def _measured(mesh=None, parts=1, has_probes=True):
    """Gradients of one step of FULL with probes."""
    execution = ExecutionConfig(mesh=MeshConfig() if mesh is None else mesh)
    probing = MKORConfig().build(parameter_table(FULL), SCHEDULE)
    step = Step(
        model=FULL,
        optimizer=probing if has_probes else optax.sgd(1.0),
        execution=execution,
        accumulation=parts,
        accumulated_balance="two_pass",
    )
    run = jax.jit(functools.partial(batch_gradients, step))
    state, rows = state_of(FULL), jax.tree.map(jnp.asarray, batch())
    if math.prod(execution.mesh.sizes) == 1:
        return run(state, rows)[1]
    made = mesh_of(execution)
    with jax.set_mesh(made):
        placed = jax.device_put(state, jax.sharding.NamedSharding(made, jax.P()))
        return run(placed, global_batch(batch(), made))[1]


def _assert_equal_means(one, other):
    for row in probed_rows(parameter_table(FULL)):
        for mean in (mean_inputs, mean_gradients):
            wanted = np.asarray(mean(one.extra_args["stats"], row.path))
            scale = np.abs(wanted).max()
            assert scale > 1e-4, row.path
            np.testing.assert_allclose(
                mean(other.extra_args["stats"], row.path),
                wanted,
                atol=2e-5 * scale,
                err_msg=row.path,
            )


@pytest.mark.slow
def test_probes_leave_the_gradients_of_a_model():
    """Against the same step without probes; the first dense matrix also against its inputs."""
    plain, probed = _measured(has_probes=False), _measured()
    assert plain.extra_args == {}
    np.testing.assert_array_equal(plain.loss, probed.loss)
    for one, other in zip(*map(jax.tree.leaves, (plain.grads, probed.grads)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    rows = probed_rows(parameter_table(FULL))
    assert {row.declaration.role for row in rows} == {
        "attention_in",
        "attention_out",
        "attention_gate",
        "mlp_in",
        "mlp_out",
        "shared_in",
        "shared_out",
    }
    # The input of the first matrix is the normed embedding of the tokens.
    table = params_of(FULL)["embedding"]["weight"]
    stream = table[jnp.asarray(batch().tokens)]
    root = jnp.sqrt(jnp.mean(stream**2, -1, keepdims=True) + FULL.norm_epsilon)
    gains = params_of(FULL)["dense_blocks_0"]["attention_norm"]["gain"][0]
    first = (stream / root * gains[None, None]).reshape(-1, FULL.embed_dim).mean(0)
    found = mean_inputs(probed.extra_args["stats"], "dense_blocks_0/attention/q")[0]
    np.testing.assert_allclose(found, first, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MeshConfig(data=4, tensor=2), marks=pytest.mark.slow),
        pytest.param(MeshConfig(replica=2, data=2, expert=2), marks=pytest.mark.large),
    ],
    ids=str,
)
def test_means_are_those_of_one_device_on_every_mesh(mesh):
    _assert_equal_means(_measured(), _measured(mesh))


@pytest.mark.large
def test_means_are_those_of_one_batch_with_accumulation():
    _assert_equal_means(_measured(), _measured(parts=4))


DENSE = ModelConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=6),
    moe=None,
    dense_dim=12,
)


@pytest.mark.slow
def test_first_step_is_that_of_adamw_and_later_ones_are_not():
    table, states = parameter_table(DENSE), []
    for config in (AdamWConfig(learning_rate=1e-2), MKORConfig(learning_rate=1e-2, interval=1)):
        optimizer = config.build(table, lambda count: jnp.ones((), jnp.float32))
        state = init_state(DENSE, optimizer, jax.random.key(0))
        step = make_train_step(DENSE, optimizer, table=table)
        path = []
        for _ in range(3):
            state, metrics = step(state, batch())
            assert not metrics.is_skipped
            path.append(jax.tree.map(np.asarray, state.params))
        states.append(path)
    for one, other in zip(*map(jax.tree.leaves, (states[0][0], states[1][0])), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    apart = [
        np.abs(one - other).max()
        for one, other in zip(*map(jax.tree.leaves, (states[0][2], states[1][2])), strict=True)
    ]
    assert max(apart) > 1e-4


def test_updates_without_statistics_are_refused():
    rows = probed_rows(parameter_table(DENSE))
    optimizer = scale_by_mkor(rows)
    with pytest.raises(ValueError, match=r"optimizer:mkor needs the statistics"):
        optimizer.update(params_of(DENSE), optimizer.init(params_of(DENSE)))


@pytest.mark.parametrize(
    ("execution", "text"),
    [
        (ExecutionConfig(mesh=MeshConfig(stage=2)), r"a stage of execution.mesh.stage=2"),
        (ExecutionConfig(mesh=MeshConfig(), rules="zero2"), r"execution.rules=zero2 gathers"),
    ],
)
def test_executions_without_probes_are_refused(execution, text):
    optimizer = MKORConfig().build(parameter_table(TINY), SCHEDULE)
    with pytest.raises(ValueError, match=text):
        Step(model=TINY, optimizer=optimizer, execution=execution)


def test_mkor_needs_a_backward_pass():
    optimizer = MKORConfig().build(parameter_table(TINY), lambda count: count)
    with pytest.raises(ValueError, match=r"optimizer:mkor reads output gradients"):
        gradients = choice("gradients", "evolution")()
        Step(model=TINY, optimizer=optimizer, gradients=gradients, clip=None)
    assert backward_of(Step(model=TINY, optimizer=optimizer)) == ProbedBackward()
    assert backward_of(Step(model=TINY, optimizer=optax.sgd(0.1))) == MicroBatchBackward()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"decay": 1.0}, r"optimizer.decay=1.0 must lie between 0 and 1"),
        ({"interval": 0}, r"optimizer.interval=0 must be at least 1"),
        ({"largest": 1.0}, r"optimizer.largest=1.0 must be above 1"),
        ({"beta1": 1.0}, r"optimizer.beta1=1.0 must lie in \[0, 1\)"),
    ],
)
def test_wrong_numbers_are_refused(given, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(MKORConfig(), **given)
