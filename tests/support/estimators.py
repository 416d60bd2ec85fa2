# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of an estimator on a mesh, and noise in the shape of the parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.contrib.estimators.noise import noise_sum
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import Step
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.one_step import batch, params_of


def step_of(
    model: ModelConfig, mesh: MeshConfig | None = None, *, clip: float | None = None, **fields
) -> Step:
    """A step on a mesh, which clips nothing by default."""
    execution = ExecutionConfig(mesh=MeshConfig() if mesh is None else mesh)
    return Step(model=model, optimizer=optax.sgd(1.0), execution=execution, clip=clip, **fields)


def state_of(model: ModelConfig, own=None) -> TrainState:
    """State before a step, of arrays of its own."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(jnp.array, params_of(model)),
        opt_state=(),
        router_state=initial_router_state(model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        parts={} if own is None else {"gradients": own},
    )


def estimated(config, step: Step, state: TrainState, rows=None):
    """The estimate of one step on the mesh of the step, as numpy arrays."""
    rows = batch() if rows is None else rows
    config.check(step)
    run = jax.jit(functools.partial(config.compute, step))
    if math.prod(step.execution.mesh.sizes) == 1:
        return jax.tree.map(np.asarray, run(state, rows))
    mesh = mesh_of(step.execution)
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))
        return jax.tree.map(np.asarray, run(placed, global_batch(rows, mesh)))


def noise_of(model: ModelConfig, key):
    """Noise of one key, as a tree."""
    return noise_sum(parameter_table(model), params_of(model), key[None], jnp.ones(1))
