# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Whole models with a router that is not causal, and a plain view of what a router chose."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxmoe.data.batch import Batch
from jaxmoe.execution import ExecutionConfig
from jaxmoe.scaling.initialize import init_params, parameter_table
from jaxmoe.training.loss import forward_and_nll
from sharding.distributed import global_batch
from tests.support.meshes import MESHES, mesh_of
from tests.support.models import BATCH, LENGTH, TINY, tokens_for


def gates_by_token(output, num_tokens):
    """[T E]: the gate of each pair, 0 where it was not chosen."""
    selection, experts = output.selection, output.logits.shape[1]
    pairs = jax.nn.one_hot(selection.token_ids, num_tokens)[:, :, None]
    pairs = pairs * jax.nn.one_hot(selection.expert_ids, experts)[:, None, :]
    return jnp.sum(pairs * jnp.exp(selection.scores)[:, None, None], axis=0)


def bidirectional(moe):
    """The small model of tests/support/models.py with this MoE layer, not causal."""
    attention = dataclasses.replace(TINY.attention, is_causal=False)
    return dataclasses.replace(TINY, moe=moe, attention=attention)


def _padded(model):
    tokens, targets = map(np.asarray, tokens_for(model))
    segment_ids = np.ones((BATCH, LENGTH), np.int32)
    segment_ids[2, 4:] = 0
    ratio = np.repeat(np.linspace(0.0, 1.0, BATCH, dtype=np.float32)[:, None], LENGTH, axis=1)
    return Batch(
        tokens=tokens,
        targets=targets,
        loss_weights=(segment_ids != 0).astype(np.float32),
        segment_ids=segment_ids,
        mask_ratio=ratio,
    )


def _gradients(model, execution):
    def loss(params, batch):
        nll, output = forward_and_nll(model, execution, params, batch, train=True)
        return nll / 40.0 + sum(output.losses.values()), output.statistics

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def loss_on_one_device(moe, execution=None):
    """`((loss, statistics), gradients)` of a padded batch."""
    model = bidirectional(moe)
    params = init_params(model, jax.random.key(0))
    return _gradients(model, execution or ExecutionConfig())(params, _padded(model))


def loss_on_mesh(moe, name=None, execution=None):
    """The same on a mesh of tests/support/meshes.py, or of an execution."""
    execution = execution or ExecutionConfig(mesh=MESHES[name])
    model, mesh = bidirectional(moe), mesh_of(execution)
    table = parameter_table(model, rules=execution.axis_rules)
    places = table.tree(lambda row: NamedSharding(mesh, row.spec))
    params = jax.device_put(init_params(model, jax.random.key(0)), places)
    with jax.set_mesh(mesh):
        return _gradients(model, execution)(params, global_batch(_padded(model), mesh))
