# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One step of an estimator on a mesh, and noise in the shape of the parameters."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.config import ModelConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.estimators import Problem
from jaxmoe.training.estimators.noise import noise_sum
from jaxmoe.training.state import TrainState
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.one_step import batch, params_of


def problem_of(model: ModelConfig, mesh: MeshConfig | None = None, **given) -> Problem:
    execution = ExecutionConfig(mesh=MeshConfig() if mesh is None else mesh)
    return Problem(model=model, execution=execution, objective=NextTokenConfig(), **given)


def state_of(model: ModelConfig, estimator=None) -> TrainState:
    """State before a step, of arrays of its own."""
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=jax.tree.map(jnp.array, params_of(model)),
        opt_state=(),
        router_state=initial_router_state(model),
        rng=jax.random.key(0),
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
        estimator=estimator,
    )


def estimated(config, problem: Problem, state: TrainState, rows=None):
    """The estimate of one step on the mesh of the problem, as numpy arrays."""
    rows = batch() if rows is None else rows
    config.check(problem)
    run = jax.jit(functools.partial(config.estimate, problem))
    if math.prod(problem.execution.mesh.sizes) == 1:
        return jax.tree.map(np.asarray, run(state, rows))
    mesh = mesh_of(problem.execution)
    with jax.set_mesh(mesh):
        placed = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.P()))
        return jax.tree.map(np.asarray, run(placed, global_batch(rows, mesh)))


def noise_of(model: ModelConfig, key):
    """Noise of one key, as a tree."""
    return noise_sum(parameter_table(model), params_of(model), key[None], jnp.ones(1))
