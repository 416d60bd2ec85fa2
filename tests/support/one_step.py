# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""One SGD step of rate 1 without clipping: the change of the parameters is the gradient."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.scaling.initialize import parameter_table
from jaxmoe.training import NextTokenConfig
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_of
from tests.support.models import BATCH, LENGTH

SGD = optax.sgd(1.0)
NEXT_TOKEN = NextTokenConfig()


def empty_state(step):
    """A state with nothing in it but the step."""
    zero = jnp.int32(0)
    return TrainState(
        step=jnp.int32(step),
        params={},
        opt_state=(),
        router_state={},
        rng=jax.random.key(0),
        skipped=zero,
        skipped_in_a_row=zero,
    )


def params_of(model):
    """Values from numpy, because compiling the initialisation takes longer.

    The arrays are made anew: made under a mesh, they have it in their types, also for later tests.
    """
    return jax.tree.map(jnp.array, _values_of(model))


@functools.cache
def _values_of(model):
    rng = np.random.default_rng(0)
    return parameter_table(model).tree(
        lambda row: (
            2 * row.init_std * rng.standard_normal(row.shape) + (row.declaration.init == "ones")
        ).astype(np.float32)
    )


def batch(loss_weight: float = 1.0) -> Batch:
    """Rows that prefer different tokens; one of them is mostly padding."""
    rng = np.random.default_rng(1)
    first = 3 * np.arange(BATCH)[:, None]
    tokens = (first + rng.integers(0, 6, (BATCH, LENGTH))).astype(np.int32)
    segment_ids = np.ones((BATCH, LENGTH), np.int32)
    segment_ids[2, 2:] = 0
    return Batch(
        tokens=tokens,
        targets=tokens,
        loss_weights=loss_weight * (segment_ids != 0).astype(np.float32),
        segment_ids=segment_ids,
    )


def step_once(model, rows, **given):
    """Losses, gradient, load and new router state of one step; arguments as of `stepped`."""
    params = params_of(model)
    state, metrics = stepped(model, rows, **given)
    return {
        "loss": metrics.loss,
        "losses": metrics.losses,
        "gradient": jax.tree.map(lambda old, new: old - np.asarray(new), params, state.params),
        "load": metrics.load,
        "router_state": state.router_state,
    }


def stepped(
    model,
    rows,
    *,
    parts=1,
    form="buffer",
    mesh=None,
    execution=None,
    skipping=None,
    objective=NEXT_TOKEN,
):
    """State and metrics of one step from fresh router state.

    Args:
        model: what is trained.
        rows: the batch.
        parts: micro-batches.
        form: of the balance loss over them.
        mesh: a row of tests/support/meshes.py; no mesh when None.
        execution: in place of such a row, with its mesh; no mesh for one device.
        skipping: layers that micro-batches leave out.
        objective: what is predicted.
    """
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
    if mesh is not None:
        execution = ExecutionConfig(mesh=MESHES[mesh])
    is_alone = execution is None or math.prod(execution.mesh.sizes) == 1
    made = None if is_alone else mesh_of(execution)
    step = make_train_step(
        model,
        SGD,
        execution=execution,
        accumulation=parts,
        clip=None,
        accumulated_balance=form,
        gradients=None if skipping is None else skipping.gradients,
        objective=objective,
    )
    if made is None:
        state, metrics = step(state, rows)
    else:
        with jax.set_mesh(made):
            placed = jax.device_put(state, jax.sharding.NamedSharding(made, jax.P()))
            state, metrics = step(placed, global_batch(rows, made))
    assert not metrics.is_skipped
    return state, metrics
