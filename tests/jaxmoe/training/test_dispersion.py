# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of single workers: planted ones, one device row by row, and meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmoe.execution import ExecutionConfig
from jaxmoe.models.transformer import initial_router_state
from jaxmoe.training.loss import forward_and_nll
from jaxmoe.training.measures.dispersion import (
    COSINE,
    LOSS_RANGE,
    LOSS_STD,
    NORM_STD,
    OutlierWatch,
    WorkerGradients,
    compare_gradients,
    gradient_scalars,
    loss_scalars,
    make_gradient_probe,
    worker_devices,
    worker_losses,
)
from jaxmoe.training.parts.worker_losses import WorkerLosses
from jaxmoe.training.state import TrainState
from jaxmoe.training.step import make_train_step
from sharding import MeshConfig, MoEMesh, make_mesh
from sharding.distributed import global_batch
from tests.support.meshes import mesh_of
from tests.support.models import BATCH, TINY
from tests.support.one_step import SGD, batch, params_of

MODEL = dataclasses.replace(TINY, num_layers=1)


def by_numpy(gradients):
    """Norms, exact cosine and the one from sums, of [N D] gradients, from all pairs."""
    norms = np.linalg.norm(gradients, axis=1)
    there = gradients[norms > 0]
    number = len(there)
    off_diagonal = ~np.eye(number, dtype=bool)
    units = there / np.linalg.norm(there, axis=1, keepdims=True)
    cosine = (units @ units.T)[off_diagonal].mean()
    from_sums = (there @ there.T)[off_diagonal].mean() / (there**2).sum(1).mean()
    return norms, cosine, from_sums


def compared(gradients):
    gradients = jnp.asarray(gradients, jnp.float32)
    half = gradients.shape[1] // 2

    def pull_back(weights):
        return {
            "a": jnp.einsum("n,nd->d", weights, gradients[:, :half]),
            "b": jnp.einsum("n,nd->d", weights, gradients[:, half:]),
        }

    found = jax.jit(lambda: compare_gradients(pull_back, len(gradients)))()
    return [np.asarray(value) for value in found]


def test_equal_gradients_have_cosine_one():
    norms, cosine, from_sums = compared(np.tile(np.arange(1.0, 7.0), (5, 1)))
    assert np.std(norms) == pytest.approx(0.0, abs=1e-6)
    assert cosine == pytest.approx(1.0, abs=1e-6) and from_sums == pytest.approx(1.0, abs=1e-6)


def test_orthogonal_gradients_have_cosine_zero():
    _, cosine, from_sums = compared(3.0 * np.eye(6))
    assert cosine == pytest.approx(0.0, abs=1e-6) and from_sums == pytest.approx(0.0, abs=1e-6)


def test_any_gradients_are_compared_as_in_pairs():
    """Those of very different norms, and one of a worker without a token, among them."""
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((7, 10)) * np.logspace(-2, 2, 7)[:, None] + 0.3
    gradients[3] = 0.0
    for found, wanted in zip(compared(gradients), by_numpy(gradients), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


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


def test_a_probe_needs_two_workers():
    with pytest.raises(ValueError, match="workers=1 must be at least 2"):
        make_gradient_probe(MODEL, workers=1)


@pytest.mark.parametrize("planted", [5.0, -5.0])
def test_who_differs_for_a_whole_window_is_named_once(planted):
    rng, watch = np.random.default_rng(0), OutlierWatch(16)
    named = []
    for step in range(60):
        values = 2.0 + 0.1 * rng.standard_normal(8) + 0.3 * rng.standard_normal()
        values[6] += 0.1 * planted * (step >= 20)
        named += [(step, outlier.worker) for outlier in watch.add(values)]
    assert [worker for _, worker in named] == [6] and 20 < named[0][0] < 36


@pytest.mark.parametrize(("workers", "steps"), [(3, 1000), (8, 1000), (64, 500), (512, 250)])
def test_nobody_is_named_for_noise(workers, steps):
    """No alarm over so many steps, of losses with heavy tails (Student's t with 3 degrees of
    freedom) whose level and noise both fall as in training; and none where all are equal."""
    rng, watch, same = np.random.default_rng(workers), OutlierWatch(16), OutlierWatch(16)
    for step in range(steps):
        level = 2.0 + 8.0 / (1 + step)
        assert not watch.add(level + 0.05 * level * rng.standard_t(3, workers))
        assert not same.add(np.full(workers, level))


def test_too_few_workers_and_steps_that_are_not_finite_are_not_judged():
    watch = OutlierWatch(1)
    assert not watch.add(np.array([1.0, 9.0])) and not watch.add(np.array([1.0, np.nan, 9.0]))
    assert [outlier.worker for outlier in watch.add(np.array([1.0, 1.0, 9.0]))] == [2]


@pytest.mark.parametrize(
    ("mesh", "fold", "workers", "wanted"),
    [
        (MeshConfig(data=8), None, 8, [[i] for i in range(8)]),
        (MeshConfig(data=8), None, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (MeshConfig(data=2, expert=2, tensor=2), None, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (MeshConfig(data=4, seq=2), None, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (MeshConfig(data=8), MoEMesh(expert=4), 8, [[i] for i in range(8)]),
    ],
)
def test_devices_of_a_worker(mesh, fold, workers, wanted):
    found = worker_devices(make_mesh(mesh, fold=fold), workers)
    assert [sorted(device.id for device in devices) for devices in found] == wanted


def _state():
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
def _row_by_row():
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


def _of_workers(workers):
    losses, gradients, tokens = _row_by_row()
    share = tokens.reshape(workers, -1) / tokens.reshape(workers, -1).sum(1, keepdims=True)
    by_worker = gradients.reshape(workers, -1, gradients.shape[1])
    return (losses.reshape(workers, -1) * share).sum(1), (by_worker * share[..., None]).sum(1)


def _placed(execution, rows):
    state, mesh = _state(), mesh_of(execution)
    whole = NamedSharding(mesh, PartitionSpec())
    return mesh, jax.device_put(state, whole), global_batch(rows, mesh)


MESHES = {
    "one": (MeshConfig(), 8),
    "data8": (MeshConfig(data=8), 8),
    "data4_expert2": (MeshConfig(data=4, expert=2), 8),
    "data4_tensor2": (MeshConfig(data=4, tensor=2), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_the_probe_is_the_gradient_of_each_workers_rows(name):
    config, workers = MESHES[name]
    execution = ExecutionConfig(mesh=config)
    probe = make_gradient_probe(MODEL, workers=workers, execution=execution)
    losses, gradients = _of_workers(workers)
    mesh, state, rows = _placed(execution, batch())
    with jax.set_mesh(mesh):
        found: WorkerGradients = jax.device_get(probe(state, rows))
        norms, cosine, from_sums = by_numpy(gradients)
        np.testing.assert_allclose(found.loss, losses, rtol=1e-5)
        np.testing.assert_allclose(found.norm, norms, rtol=1e-4)
        np.testing.assert_allclose(found.cosine, cosine, atol=1e-5)
        np.testing.assert_allclose(found.cosine_from_sums, from_sums, atol=1e-5)
        if name in ("one", "data4_expert2"):
            same = jax.tree.map(lambda a: np.repeat(a[:1], BATCH, axis=0), batch())
            found = jax.device_get(probe(state, global_batch(same, mesh)))
            assert found.loss.std() == pytest.approx(0.0, abs=1e-6)
            scalars = gradient_scalars(found)
            assert scalars[COSINE] == pytest.approx(1.0, abs=1e-5)
            assert scalars[NORM_STD] == pytest.approx(0.0, abs=1e-4 * norms.max())


@pytest.mark.slow
def test_the_training_step_knows_the_loss_of_each_worker():
    """In two micro-batches on a mesh; it is the same step, bit for bit, as without workers."""
    execution = ExecutionConfig(mesh=MeshConfig(data=2, expert=2, tensor=2))
    mesh, state, rows = _placed(execution, batch())
    losses, _ = _of_workers(4)
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
