# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses of single workers: sums of rows, and a step on a mesh beside one device row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.execution import ExecutionConfig
from jaxmoe.training.parts.worker_losses import (
    LOSS_RANGE,
    LOSS_STD,
    WorkerLosses,
    loss_scalars,
    worker_losses,
)
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig
from tests.support.one_step import SGD, batch
from tests.support.row_by_row import MODEL, by_worker, placed


def test_losses_of_workers_add_up_over_micro_batches():
    """Row i of each micro-batch is one of the worker's; no token: NaN, and no part of the range."""
    rng, placement = np.random.default_rng(0), ExecutionConfig().placement
    nll, tokens = rng.random(12).astype(np.float32), rng.integers(1, 9, 12).astype(np.float32)
    nll[9:], tokens[9:] = 0.0, 0.0
    wanted = nll.reshape(4, 3).sum(1)[:3] / tokens.reshape(4, 3).sum(1)[:3]
    for micro_batches in (1, 3):
        summed = nll.reshape(-1, micro_batches).sum(1)
        found = worker_losses(jnp.asarray(summed), jnp.asarray(tokens), 4, placement)
        assert found is not None
        np.testing.assert_allclose(found[:3], wanted, rtol=1e-6)
        assert np.isnan(found[3])
        scalars = loss_scalars(found)
        apart = {LOSS_STD: wanted.std(), LOSS_RANGE: np.ptp(wanted)}
        assert scalars == pytest.approx(apart, rel=1e-5)
    assert loss_scalars(None) == {} == loss_scalars(np.full(4, np.nan))
    assert worker_losses(None, None, 4, placement) is None


@pytest.mark.slow
def test_the_training_step_knows_the_loss_of_each_worker():
    """In two micro-batches on a mesh; it is the same step, bit for bit, as without workers."""
    execution = ExecutionConfig(mesh=MeshConfig(data=2, expert=2, tensor=2))
    mesh, state, rows = placed(execution, batch())
    losses, _ = by_worker(4)
    with jax.set_mesh(mesh):
        found = {}
        for workers, parts in ((1, ()), (4, (WorkerLosses(workers=4),))):
            step = make_train_step(
                MODEL, SGD, execution=execution, accumulation=2, clip=None, parts=parts
            )
            found[workers] = step(jax.tree.map(lambda x: x.copy(), state), rows)
    assert found[1][1].worker_loss is None
    np.testing.assert_allclose(found[4][1].worker_loss, losses, rtol=1e-5)
    for with_workers, without in zip(
        jax.tree.leaves(found[4][0].params), jax.tree.leaves(found[1][0].params), strict=True
    ):
        np.testing.assert_array_equal(with_workers, without)
