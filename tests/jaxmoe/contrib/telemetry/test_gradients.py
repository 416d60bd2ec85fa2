# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of single workers: any vectors in pairs, and meshes beside one device row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.contrib.telemetry.gradients import (
    COSINE,
    NORM_STD,
    WorkerGradients,
    compare_gradients,
    gradient_scalars,
    make_gradient_probe,
)
from jaxmoe.execution import ExecutionConfig
from sharding import MeshConfig
from sharding.distributed import global_batch
from tests.support.models import BATCH
from tests.support.one_step import batch
from tests.support.row_by_row import MODEL, by_worker, placed


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


def test_a_probe_needs_two_workers():
    with pytest.raises(ValueError, match="workers=1 must be at least 2"):
        make_gradient_probe(MODEL, workers=1)


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
    losses, gradients = by_worker(workers)
    mesh, state, rows = placed(execution, batch())
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
