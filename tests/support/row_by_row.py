# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of a layer of each row of a batch alone, on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.state import TrainState
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import BATCH, TINY
from tests.support.one_step import SGD, batch, params_of

MODEL = dataclasses.replace(TINY, num_layers=1)


def state_of_one_layer():
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params_of(MODEL),
        opt_state=SGD.init(params_of(MODEL)),
        router_state=initial_router_state(MODEL),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


@functools.cache
def row_by_row():
    """Loss and gradient [D] of the tokens of each row, computed with nothing else in the batch."""

    @jax.jit
    def one(params, rows):
        def loss(params):
            nll, _ = forward_and_nll(MODEL, ExecutionConfig(), params, rows, train=True)
            return nll / rows.loss_weights.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        return value, jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)])

    rows = batch()
    found = [
        one(params_of(MODEL), jax.tree.map(lambda a, i=i: jnp.asarray(a[i : i + 1]), rows))
        for i in range(BATCH)
    ]
    losses, gradients = (np.stack([np.asarray(f[i], np.float64) for f in found]) for i in (0, 1))
    return losses, gradients, rows.loss_weights.sum(axis=1)


def by_worker(workers):
    losses, gradients, tokens = row_by_row()
    share = tokens.reshape(workers, -1) / tokens.reshape(workers, -1).sum(1, keepdims=True)
    parts = gradients.reshape(workers, -1, gradients.shape[1])
    return (losses.reshape(workers, -1) * share).sum(1), (parts * share[..., None]).sum(1)


def placed(execution, rows):
    state, mesh = state_of_one_layer(), mesh_of(execution)
    whole = NamedSharding(mesh, PartitionSpec())
    return mesh, jax.device_put(state, whole), global_batch(rows, mesh)
