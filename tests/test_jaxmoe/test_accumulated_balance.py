# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The balance loss of a batch that is seen in parts: `buffer`, `two_pass`, and what has no parts.

SGD of rate 1 without clipping: what the parameters move is the gradient. Everything but the balance
losses has weight 0 in these batches, so that nothing hides them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.initialize import parameter_table
from jaxmoe.models.transformer import forward, initial_router_state
from jaxmoe.routing import LoadBalanceConfig, RouterZConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_named
from tests.support.models import BATCH, LENGTH, TINY
from tests.support.tolerances import assert_close

PARTS = 4
SGD = optax.sgd(1.0)


def model_with(*balancers):
    return dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, balancers=balancers))


GLOBAL = model_with(LoadBalanceConfig(coefficient=1.0), RouterZConfig(coefficient=0.1))
MICRO = model_with(LoadBalanceConfig(coefficient=1.0, scope="micro_batch"))
ROWS = model_with(LoadBalanceConfig(coefficient=1.0, scope="sequence"))


@functools.cache
def params_of(model):
    rng = np.random.default_rng(0)
    values = parameter_table(model).tree(
        lambda row: (
            2 * row.init_std * rng.standard_normal(row.shape) + (row.declaration.init == "ones")
        ).astype(np.float32)
    )
    return jax.tree.map(jnp.asarray, values)


def batch() -> Batch:
    """Rows that prefer different tokens; one of them is mostly padding."""
    rng = np.random.default_rng(1)
    first = 3 * np.arange(BATCH)[:, None]
    tokens = (first + rng.integers(0, 6, (BATCH, LENGTH))).astype(np.int32)
    segment_ids = np.ones((BATCH, LENGTH), np.int32)
    segment_ids[2, 2:] = 0
    return Batch(
        tokens=tokens,
        targets=tokens,
        loss_weights=np.zeros((BATCH, LENGTH), np.float32),
        segment_ids=segment_ids,
    )


def one_step(model, parts, form="buffer", mesh=None):
    """(losses, gradient, load) of one step."""
    params = params_of(model)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(jnp.array, params),
        opt_state=SGD.init(params),
        router_state=initial_router_state(model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
    execution = ExecutionConfig() if mesh is None else ExecutionConfig(mesh=MESHES[mesh])
    step = make_train_step(
        model, SGD, execution=execution, accumulation=parts, clip=None, accumulated_balance=form
    )
    if mesh is None:
        state, metrics = step(state, batch())
    else:
        with jax.set_mesh(mesh_named(mesh)):
            placed = jax.device_put(state, jax.sharding.NamedSharding(mesh_named(mesh), jax.P()))
            state, metrics = step(placed, global_batch(batch(), mesh_named(mesh)))
    gradient = jax.tree.map(lambda old, new: old - np.asarray(new), params, state.params)
    return metrics.losses, gradient, metrics.load


@functools.cache
def undivided(model):
    return one_step(model, 1)


@pytest.mark.parametrize("model", [GLOBAL, ROWS], ids=["global", "sequence"])
def test_two_passes_are_one_large_batch(model):
    """Value and gradient, although the micro-batches differ in load and in number of tokens."""
    assert_close(one_step(model, PARTS, "two_pass"), undivided(model), "end_to_end")


@pytest.mark.parametrize(("mesh", "parts"), [("data2", PARTS), ("data4_tensor2", 2)])
def test_two_passes_on_a_mesh(mesh, parts):
    assert_close(one_step(GLOBAL, parts, "two_pass", mesh), undivided(GLOBAL), "end_to_end")


def micro_statistics(model, params):
    """Statistics of each micro-batch: rows i, i + PARTS, ..."""
    whole = batch()
    for part in range(PARTS):
        rows = slice(part, None, PARTS)
        output = forward(
            model,
            ExecutionConfig(),
            params,
            jnp.asarray(whole.tokens[rows]),
            segment_ids=jnp.asarray(whole.segment_ids[rows]),
            train=True,
        )
        yield output.statistics


@pytest.mark.parametrize("model", [GLOBAL, MICRO], ids=["buffer", "micro_batch"])
def test_one_pass_by_hand(model):
    """`buffer` takes the load of the micro-batches so far, `micro_batch` that of each alone."""

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def by_hand(params):
        counts, values = jnp.zeros(()), {}
        for statistics in micro_statistics(model, params):
            counts = counts + statistics.counts if model is GLOBAL else statistics.counts
            share = jax.lax.stop_gradient(counts / counts.sum(-1, keepdims=True))
            probs = statistics.prob_sum / statistics.num_tokens[:, None]
            terms = {"load_balance": TINY.moe.num_experts * jnp.sum(share * probs)}
            if model is GLOBAL:
                terms["router_z"] = 0.1 * jnp.sum(statistics.z_sum / statistics.num_tokens)
            for name, term in terms.items():
                values[name] = values.get(name, 0.0) + term / PARTS
        return sum(values.values()), values

    (_, losses), gradient = by_hand(params_of(model))
    got_losses, got_gradient, _ = one_step(model, PARTS)
    assert_close((got_losses, got_gradient), (losses, gradient), "end_to_end")


def test_the_forms_differ():
    """Otherwise the tests above would show nothing."""
    values = [
        float(losses["load_balance"])
        for losses, *_ in (
            undivided(GLOBAL),
            one_step(GLOBAL, PARTS),
            one_step(MICRO, PARTS),
            undivided(ROWS),
        )
    ]
    assert np.abs(np.diff(np.sort(values))).min() > 1e-3
