# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Steps of workers that exchange gradients, with a model, on one device and on eight.

To add a method: a row in GRADIENTS, with settings that give the mean of the gradients.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.slow_links import CodedConfig, EControlConfig, OneBitAdamConfig, RobustConfig
from jaxmoe.contrib.slow_links.gradient_method import Agreed, Contribution, exchange_gradients
from jaxmoe.contrib.slow_links.workers.gradient_state import GradientTraining
from jaxmoe.contrib.slow_links.workers.gradient_step import gradient_step
from jaxmoe.contrib.slow_links.workers.local import local_of
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.optim import AdamWConfig
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.estimators import StepGradients
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.constrain import place_like
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import TINY
from tests.support.one_step import batch, params_of
from tests.support.tolerances import assert_close

WORKERS, STEPS = 2, 2
GRADIENTS = {
    "coded": CodedConfig(workers=WORKERS),
    "econtrol": EControlConfig(share=1.0, workers=WORKERS),
    "one_bit_adam": OneBitAdamConfig(freeze_share=1.0, workers=WORKERS),
}
ONE = ExecutionConfig()
MESH = ExecutionConfig(mesh=MeshConfig(replica=2, data=2, expert=2))
ADAMW = AdamWConfig(learning_rate=1e-2, epsilon=1e-2)  # at 1e-8 noise has a sign


def parts_of(config, execution):
    table = parameter_table(TINY, rules=execution.axis_rules)
    optimizer = config.adapt(ADAMW, STEPS).build(table, lambda step: jnp.ones(()))
    step = Step(model=TINY, optimizer=optimizer, execution=execution, table=table)
    return GradientTraining.of(config, table, step, STEPS), step


def first_state(training, step):
    params = params_of(TINY)
    if step.execution is not ONE:
        mesh = mesh_of(step.execution)
        specs = step.table.tree(lambda row: jax.NamedSharding(mesh, row.spec))
        params = jax.device_put(params, specs)

    def rest(params):
        zero = jnp.zeros((), jnp.int32)
        state = TrainState(
            step=zero,
            params=params,
            opt_state=step.optimizer.init(params),
            router_state=initial_router_state(TINY),
            rng=jax.random.key(3),
            skipped=zero,
            skipped_in_a_row=zero,
        )
        return training.begin(state)

    return jax.jit(rest)(params)


def trained(config, execution, alive=None):
    """State and losses after some steps."""
    training, step = parts_of(config, execution)
    mesh = None if execution is ONE else mesh_of(execution)
    rows = batch() if mesh is None else global_batch(batch(), mesh)
    losses = []
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = first_state(training, step)
        run = jax.jit(functools.partial(gradient_step, training))
        for _ in range(STEPS):
            state, metrics = run(state, rows, alive)
            losses.append(metrics.loss)
    return state, losses, metrics


@functools.cache
def by_hand():
    """The same steps: gradients of each worker's rows, weighted by its tokens."""
    training, step = parts_of(EControlConfig(workers=WORKERS), ONE)
    state = first_state(training, step)
    rows = batch()

    @jax.jit
    def one(state):
        found = []
        for worker in range(WORKERS):
            mine = jax.tree.map(lambda x, w=worker: jnp.asarray(x)[w * 4 : w * 4 + 4], rows)
            found.append(step.gradients.compute(step, state, mine, worker * 4)[:3])
        total = found[0][0] + found[1][0]
        shares = [weight / total for weight, *_ in found]
        grads = [jax.tree.map(lambda g, s=s: s * g, f.grads) for s, (_, f, _) in zip(shares, found)]  # noqa: B905
        whole = found[0][1] + found[1][1]
        loss = sum(s * f.loss for s, (_, f, _) in zip(shares, found))  # noqa: B905
        whole = whole.replace(grads=jax.tree.map(jnp.add, *grads), loss=loss)
        state, metrics, _ = step.finish(state, StepGradients(total, whole))
        return state, metrics

    losses = []
    for _ in range(STEPS):
        state, metrics = one(state)
        losses.append(metrics.loss)
    return state, losses, metrics


def check(config, execution):
    state, losses, metrics = trained(config, execution)
    wanted, wanted_losses, wanted_metrics = by_hand()
    assert_close(losses, wanted_losses, "end_to_end")
    assert_close(state.params, wanted.params, "end_to_end")
    assert_close(metrics.load, wanted_metrics.load, "end_to_end")
    assert float(metrics.num_tokens) == float(wanted_metrics.num_tokens)


@pytest.mark.slow
@pytest.mark.rows(3)
@pytest.mark.parametrize("name", GRADIENTS)
def test_steps_of_two_workers_equal_the_mean_of_their_gradients_by_hand(name):
    check(GRADIENTS[name], ONE)


EXCHANGES = {
    "coded": CodedConfig(workers=WORKERS),
    # Tiles that every device holds whole.
    "econtrol": EControlConfig(share=0.3, tile=2, workers=WORKERS),
    "one_bit_adam": OneBitAdamConfig(freeze_share=0.1, workers=WORKERS),
    "robust": RobustConfig(workers=WORKERS),
}


def exchanged(config, execution):
    """Results and states of two exchanges of given gradients, encoded from the first on."""
    training, step = parts_of(config, execution)
    mesh = None if execution is ONE else mesh_of(execution)
    parts = 1 if training.method.code is None else training.method.code.parts
    rng = np.random.default_rng(5)
    shape = (WORKERS, parts)

    def given():
        grads = {
            path: jnp.asarray(rng.standard_normal((WORKERS, *leaf.shape)), jnp.float32)
            for path, leaf in training.leaves.items()
        }
        # Experts without tokens.
        return {
            path: x.at[:, 0, 1].set(0.0) if "experts" in path else x for path, x in grads.items()
        }

    first, second = given(), given()
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = first_state(training, step)

        def like(grads):
            stacked = training.workers.stack(training.trained_by_path(state.params))
            return {path: place_like(x, stacked[path]) for path, x in grads.items()}

        def both(state, *rounds):
            found, talk = [], local_of(state)
            agreed = None
            if training.method.agreed is not None:
                mean = training.trained_by_path(state.params)
                agreed = Agreed(
                    momentum=jax.tree.map(lambda x: 0.1 * x, mean),
                    mask={path: jnp.abs(x) > 1e-3 for path, x in mean.items()},
                    is_encoded=jnp.ones((), bool),
                )
                agreed = agreed._replace(
                    momentum=jax.tree.map(
                        lambda m, x: jnp.where(m, x, 0.0), agreed.mask, agreed.momentum
                    )
                )
            for number, grads in enumerate(rounds):
                mixed, talk, _ = exchange_gradients(
                    training.method,
                    training.leaves,
                    talk,
                    Contribution(
                        grads=like(grads),
                        tokens=training.workers.stack(jnp.ones(shape[1:])),
                        is_finite=training.workers.stack(jnp.ones((), bool)),
                    ),
                    training.trained_by_path(state.params),
                    training.workers,
                    number=jnp.int32(number),
                    key=state.rng,
                    agreed=agreed,
                )
                found.append(mixed)
            return found, talk

        return jax.jit(both)(state, first, second)


def test_parameters_made_under_a_mesh_are_those_of_no_later_test():
    with jax.set_mesh(mesh_of(MESH)):
        params_of(TINY)
    meshes = {jax.typeof(leaf).sharding.mesh.empty for leaf in jax.tree.leaves(params_of(TINY))}
    assert meshes == {True}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_on_a_mesh_give_the_numbers_of_one_device(name):
    """Norms, products and places in tiles are those of whole parameters, however they lie."""
    found, talk = exchanged(EXCHANGES[name], MESH)
    wanted, wanted_talk = exchanged(EXCHANGES[name], ONE)
    assert_close(found, wanted, "matmul")
    assert_close(talk.codec, wanted_talk.codec, "matmul")
    if name == "one_bit_adam":  # parts of the second error lie at other workers
        errors, wanted_errors = jax.tree.map(
            lambda x: np.asarray(x).sum(axis=0), [talk.exchange, wanted_talk.exchange]
        )
        assert_close(errors, wanted_errors, "matmul")
    else:
        assert_close(talk.exchange, wanted_talk.exchange, "matmul")


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("name", GRADIENTS)
def test_steps_on_a_mesh_equal_those_by_hand(name):
    check(GRADIENTS[name], MESH)


def test_meshes_without_places_for_the_workers_are_refused():
    with pytest.raises(ValueError, match="replica=2 must be replicas.workers=3, or 1"):
        parts_of(EControlConfig(workers=3), MESH)
    with pytest.raises(ValueError, match="must be at least 2, and is 1"):
        parts_of(EControlConfig(), ONE)
    hybrid = ExecutionConfig(mesh=MeshConfig(replica=2, data=4), rules="hybrid")
    with pytest.raises(ValueError, match="choose fully_sharded or zero2"):
        parts_of(EControlConfig(), hybrid)


@pytest.mark.slow
def test_a_step_that_the_guard_refuses_leaves_the_state_of_the_exchanges():
    state, _, metrics = trained(GRADIENTS["econtrol"], ONE, alive=np.zeros((WORKERS,), bool))
    assert bool(metrics.is_skipped)
    assert int(state.skipped) == STEPS
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(local_of(state)))
    assert_close(state.params, params_of(TINY), "elementwise")
