# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Workers that differ: planted ones, noise, and the devices of each."""

import numpy as np
import pytest

from jaxmoe.resilience.outliers import OutlierWatch, worker_devices
from sharding import MeshConfig, MoEMesh, make_mesh


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
