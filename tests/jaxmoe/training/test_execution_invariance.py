# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""The table of executions: meshes, folds, exact dispatchers and layouts of state; one loss."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig, OffloadConfig
from jaxmoe.models.embedding import head_weight
from jaxmoe.models.transformer import Transformer
from jaxmoe.optim import adamw
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.state import init_state
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh
from sharding.distributed import global_batch
from sharding.sequence_parallel import AllGatherKVConfig
from tests.support.losses import summed_nll
from tests.support.meshes import EXECUTIONS, IN_SHORT, mesh_of
from tests.support.models import WIDE, WIDE_LENGTH, tokens_for
from tests.support.tolerances import assert_close


@functools.cache
def values():
    """Parameters of which none has the value of a fresh model, gains and router included."""
    params = init_params(WIDE, jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: 2.0 * leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), params
    )


def batch():
    tokens, targets = map(np.asarray, tokens_for(WIDE, length=WIDE_LENGTH))
    segments = np.ones_like(tokens)
    segments[:, 8:] = 2
    segments[3, 12:] = 0  # padding
    positions = np.broadcast_to(np.r_[0:8, 0:8].astype(np.int32), tokens.shape).copy()
    return {
        "tokens": tokens,
        "targets": targets,
        "segment_ids": segments,
        "positions": positions,
    }


def loss_and_gradients(execution):
    def loss(params, batch):
        output = Transformer(WIDE, execution).apply(
            {"params": params},
            batch["tokens"],
            positions=batch["positions"],
            segment_ids=batch["segment_ids"],
            has_logits=False,
        )
        counted = (batch["segment_ids"] != 0).astype(jnp.float32)
        nll = summed_nll(
            output.hidden,
            head_weight(params, WIDE),
            batch["targets"],
            counted,
            model=WIDE,
            execution=execution,
        )
        aside = {"nll": nll, "losses": output.losses, "statistics": output.statistics}
        return nll / counted.sum() + sum(output.losses.values()), aside

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def on_one_device():
    return loss_and_gradients(ExecutionConfig())(values(), batch())


def rows_of(table, in_short):
    """Names for `pytest.mark.parametrize`; those not `in_short` are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in in_short else slow) for name in table]


@pytest.mark.parametrize("name", rows_of(EXECUTIONS, IN_SHORT))
def test_loss_and_gradients_equal_on_every_execution(name):
    execution = EXECUTIONS[name]
    mesh, table = mesh_of(execution), parameter_table(WIDE, rules=execution.axis_rules)
    table.check_divides(execution.axis_rules, dict(mesh.shape))
    params = jax.device_put(values(), table.tree(lambda row: NamedSharding(mesh, row.spec)))
    with jax.set_mesh(mesh):
        result = loss_and_gradients(execution)(params, global_batch(batch(), mesh))
    assert_close(result, on_one_device(), "end_to_end")
    specs = table.tree(lambda row: row.spec)
    assert jax.tree.map(lambda gradient: gradient.sharding.spec, result[1]) == specs


STATES = {
    "zero1": ExecutionConfig(mesh=MeshConfig(data=4, expert=2), rules="zero1"),
    "zero2": ExecutionConfig(mesh=MeshConfig(data=4, tensor=2), rules="zero2"),
    "zero2_full": ExecutionConfig(mesh=MeshConfig(data=4), rules="zero2", remat="full"),
    "hybrid": ExecutionConfig(mesh=MeshConfig(replica=2, data=4), rules="hybrid"),
    "hierarchical": ExecutionConfig(mesh=MeshConfig(replica=2, data=4), rules="hierarchical"),
    "hierarchical_full": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=2, tensor=2), rules="hierarchical", remat="full"
    ),
    "optimizer_on_host": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2), offload=OffloadConfig(), remat="offload"
    ),
    "optimizer_on_host_in_parts": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2), rules="zero1", offload=OffloadConfig(parts=2)
    ),
    "parameters_on_host": ExecutionConfig(
        mesh=MeshConfig(data=4, tensor=2),
        remat="offload",
        offload=OffloadConfig(parts=2, parameters="host"),
    ),
    "nested": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=2, expert=2), rules="nested", remat="full"
    ),
    "nested_fold": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=2, seq=2),
        rules="nested",
        fold=MoEMesh(expert=2),
        sequence_parallel=AllGatherKVConfig(),
    ),
    "hierarchical_fold": ExecutionConfig(
        mesh=MeshConfig(replica=2, data=4), rules="hierarchical", fold=MoEMesh(expert=2)
    ),
}


def two_steps(execution, mesh):
    """Parameters and moments after two steps of Adam, and the losses."""
    optimizer = adamw(1e-2, epsilon=1e-2, weight_decay=0.1)  # at 1e-8 noise has a sign
    state = init_state(WIDE, optimizer, jax.random.key(0), execution=execution, mesh=mesh)
    step = make_train_step(WIDE, optimizer, execution=execution)
    rows = batch()
    rows = Batch(loss_weights=(rows["segment_ids"] != 0).astype(np.float32), **rows)
    losses = []
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        for _ in range(2):
            state, metrics = step(state, rows if mesh is None else global_batch(rows, mesh))
            losses.append(metrics.loss)
    return state, losses


@functools.cache
def steps_on_one_device():
    return two_steps(ExecutionConfig(), None)


@pytest.mark.parametrize("name", rows_of(STATES, ()))
def test_steps_are_the_same_with_every_layout_of_the_state(name):
    """With every layout of parameters, gradients and moments; each has its layout's sharding."""
    execution = STATES[name]
    state, losses = two_steps(execution, mesh_of(execution))
    wanted, wanted_losses = steps_on_one_device()
    assert_close(losses, wanted_losses, "end_to_end")
    assert_close(state.params, wanted.params, "end_to_end")
    assert_close(state.opt_state, wanted.opt_state, "end_to_end")
    layout, kinds = execution.state_layout, {"device": "device", "host": "pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moments(state))} == {
        kinds[execution.optimizer_memory]
    }
    for tree, rules in ((state.params, layout.parameters), (moments(state), layout.optimizer)):
        specs = parameter_table(WIDE, rules=rules).tree(lambda row: row.spec)
        assert jax.tree.map(lambda leaf: leaf.sharding.spec, tree) == specs


def moments(state):
    """The second moments of Adam, a tree like the parameters."""
    return next(
        part.nu
        for part in jax.tree.leaves(state.opt_state, is_leaf=lambda node: hasattr(node, "nu"))
        if hasattr(part, "nu")
    )
