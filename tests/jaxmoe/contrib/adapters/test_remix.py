# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""ReMix: its estimate by enumeration, its draws, and the gradients of a step."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import NamedSharding

from jaxmoe.adapters import RemixConfig
from jaxmoe.contrib.adapters.remix import draw, log_prob
from jaxmoe.contrib.adapters.repeated import ADVANTAGE, advantages
from jaxmoe.contrib.estimators.spsa import SPSAConfig
from jaxmoe.execution import ExecutionConfig
from jaxmoe.layers.view import HalfInputs
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.gradients import batch_gradients
from jaxmoe.training.loss import forward_and_row_nll
from jaxmoe.training.state import state_around
from jaxmoe.training.step import Step, make_train_step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import WIDE
from tests.support.one_step import SGD, batch
from tests.support.tolerances import assert_close

CONFIG = RemixConfig(members=4, rank=2, draws=2)
# Losses of balancers are of several micro-batches together.
assert WIDE.moe is not None
MOE = dataclasses.replace(WIDE.moe, balancers=())
MODEL = dataclasses.replace(WIDE, num_layers=1, moe=MOE, adapter=CONFIG)
ORDERS = jnp.array(list(itertools.permutations(range(4), 2)), jnp.int32)
LOGITS = jax.random.normal(jax.random.key(0), (4,))


def logs_of(logits):
    return log_prob(jnp.broadcast_to(logits, (len(ORDERS), 4)), ORDERS)


def test_the_estimate_of_the_routers_gradient_is_unbiased_by_enumeration():
    """Over all triples of ordered draws of 2 of 4."""
    loss = np.asarray(jax.random.normal(jax.random.key(1), (len(ORDERS),)), np.float64)
    wanted = jax.grad(lambda logits: jnp.sum(jnp.exp(logs_of(logits)) * loss.astype("f4")))(LOGITS)
    prob = np.exp(np.asarray(logs_of(LOGITS), np.float64))
    slope = np.asarray(jax.jacobian(logs_of)(LOGITS), np.float64)
    assert prob.sum() == pytest.approx(1.0, abs=1e-6)
    triples = np.array(list(itertools.product(range(len(ORDERS)), repeat=3)))
    factors = np.asarray(advantages(jnp.asarray(loss[triples], jnp.float32)))
    estimates = np.sum(factors[..., None] * slope[triples], axis=1)
    mean = np.sum(prob[triples].prod(axis=1)[:, None] * estimates, axis=0)
    np.testing.assert_allclose(mean, wanted, atol=1e-6)
    assert np.abs(wanted).max() > 0.05
    assert not np.any(advantages(jnp.full((5, 2), 3.7)))


def test_draws_have_the_probabilities_of_drawing_without_replacement():
    count = 4000
    logits = jnp.broadcast_to(LOGITS, (1, count, 4))
    ids = draw(logits, jnp.arange(count, dtype=jnp.int32)[None], jax.random.key(2), 2)[0]
    found = np.mean(np.all(np.asarray(ids)[:, None] == np.asarray(ORDERS), axis=-1), axis=0)
    np.testing.assert_allclose(found, np.exp(logs_of(LOGITS)), atol=0.025)


@pytest.mark.parametrize(("weight", "each"), [("mean", 1 / 2), ("root", 2**-0.5)])
def test_inference_takes_the_largest_and_training_draws(weight, each):
    config = dataclasses.replace(CONFIG, weight=weight)
    own = {"router": jax.random.normal(jax.random.key(1), (8, 4))}
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    index = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)

    def gates(key, train):
        given = HalfInputs(
            x=x, token_mask=jnp.ones((2, 3), bool), context={"index": index}, key=key
        )
        found, losses = config.mix(own, given, ExecutionConfig().placement, train=train)
        assert losses == {}
        assert found is not None
        return np.asarray(found.values[:, :, 0])

    best = np.argsort(np.asarray(x @ own["router"]), axis=-1)[..., 2:]
    wanted = np.zeros((2, 3, 4), np.float32)
    np.put_along_axis(wanted, best, np.float32(each), axis=-1)
    for key in (None, jax.random.key(3), jax.random.key(4)):
        np.testing.assert_allclose(gates(key, False), wanted, rtol=1e-6)
    one, other = (gates(jax.random.key(number), True) for number in (3, 4))
    assert not np.array_equal(one, other)
    np.testing.assert_allclose(np.sum([one, other], axis=-1), 2 * each, rtol=1e-6)


def state_of(ups):
    """State with additions of one size; with 0 the loss does not depend on the draw."""
    flat: dict = traverse_util.flatten_dict(init_params(MODEL, jax.random.key(0)), sep="/")
    for number, path in enumerate(sorted(path for path in flat if path.endswith(":ups"))):
        flat[path] = ups * jax.random.normal(jax.random.key(number), flat[path].shape)
    params = traverse_util.unflatten_dict(flat, sep="/")
    return state_around(MODEL, SGD, ExecutionConfig(), params, jax.random.key(5))


def gradients_of(state, rows, execution, accumulation):
    step = Step(
        model=MODEL,
        optimizer=SGD,
        execution=execution,
        accumulation=accumulation,
        table=parameter_table(MODEL),
    )
    _, summed = batch_gradients(step, state, rows)
    return summed.loss, traverse_util.flatten_dict(summed.grads, sep="/")


def by_hand(state, rows):
    """Loss and gradients from one pass after the other."""
    table, length = parameter_table(MODEL), rows.tokens.shape
    weight = rows.loss_weights.sum()

    def one(trained, number, advantage):
        extra = {ADVANTAGE: jnp.broadcast_to(advantage[:, None], length)}
        nll, of_rows, output = forward_and_row_nll(
            MODEL,
            ExecutionConfig(),
            table.merge(trained, state.params),
            dataclasses.replace(rows, extra=extra),
            row_ids=2 * jnp.arange(length[0], dtype=jnp.int32) + number,
            train=True,
            key=jax.random.fold_in(state.rng, 0),
        )
        losses = dict(output.losses)
        router = losses.pop("adapter_router")
        total = (nll / weight + sum(losses.values(), jnp.float32(0.0))) / 2 + router
        return total, of_rows / weight

    trained = table.select_trained(state.params)
    none = jnp.zeros(length[0])
    losses = [one(trained, number, none)[1] for number in range(2)]
    half = (losses[0] - losses[1]) / 2
    grads = [
        jax.grad(lambda t, n=number, a=sign * half: one(t, n, a)[0])(trained)
        for number, sign in enumerate((1.0, -1.0))
    ]
    total = traverse_util.flatten_dict(jax.tree.map(jnp.add, *grads), sep="/")
    return sum(jnp.sum(loss) for loss in losses) / 2, total


@pytest.mark.slow
def test_gradients_of_a_step_equal_those_of_single_passes_on_every_mesh():
    state, rows = state_of(0.5), batch()
    wanted_loss, wanted = jax.jit(by_hand)(state, jax.tree.map(jnp.asarray, rows))
    single = ExecutionConfig()
    run = jax.jit(gradients_of, static_argnums=(2, 3))
    found = {"one": run(state, rows, single, 1)}
    execution = ExecutionConfig(mesh=MeshConfig(data=2, tensor=2))
    mesh, table = mesh_of(execution), parameter_table(MODEL, rules=execution.axis_rules)
    specs = table.tree(lambda row: NamedSharding(mesh, row.spec))
    placed = jax.device_put(state, NamedSharding(mesh, jax.P()))
    placed = dataclasses.replace(placed, params=jax.device_put(state.params, specs))
    with jax.set_mesh(mesh):
        found["mesh"] = run(placed, global_batch(rows, mesh), execution, 2)
    for loss, grads in found.values():
        assert_close(loss, wanted_loss, "end_to_end")
        for row in table.trained_rows:
            assert_close(grads[row.path], wanted[row.path], "end_to_end")
            assert float(jnp.abs(wanted[row.path]).max()) > 0, row.path


@pytest.mark.slow
def test_a_loss_that_no_draw_changes_gives_the_router_no_gradient():
    _, grads = jax.jit(gradients_of, static_argnums=(2, 3))(
        state_of(0.0), batch(), ExecutionConfig(), 1
    )
    assert any(path.endswith(":router") for path in grads)
    for path, gradient in grads.items():
        if path.endswith(":router"):
            assert not np.any(gradient), path
        if path.endswith(":ups"):
            assert np.any(gradient), path


def test_steps_that_cannot_compare_passes_are_refused():
    with pytest.raises(ValueError, match="training.gradients:spsa has no backward pass"):
        make_train_step(MODEL, SGD, gradients=SPSAConfig(), clip=None)
    halves = ExecutionConfig(halves=2)
    with pytest.raises(ValueError, match="adapter:remix compares .* execution.halves=2"):
        make_train_step(MODEL, SGD, execution=halves)
