# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DADAO on convex losses: all workers reach the common optimum, geometrically."""

import functools

import numpy as np
import pytest

from jaxmoe.contrib.slow_links.methods.a2cid2 import edges_of
from tests.support import dadao

WORKERS = 6


@functools.cache
def distances(graph, convexity=0.5, time=1200.0):
    problem = dadao.quadratics(WORKERS, 4, convexity=convexity)
    return dadao.run(problem, edges_of(graph, WORKERS), WORKERS, time, every=100.0)


def rates(seen):
    """Decline of the logarithm of the distance in each stretch of time 100, after the first."""
    return -np.diff(np.log(seen[1:]))


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_workers_reach_the_common_optimum_geometrically(graph):
    seen = distances(graph)
    assert seen[0] > 1.0 and seen[-1] < 1e-9 * seen[0]
    assert (np.abs(rates(seen) / rates(seen).mean() - 1) < 0.15).all()


def test_optima_of_the_workers_lie_apart():
    """The common optimum is none of theirs, and no worker is still at it without the others."""
    problem = dadao.quadratics(WORKERS, 4)
    gradients = [problem.gradient(worker, problem.optimum) for worker in range(WORKERS)]
    assert min(np.linalg.norm(gradient) for gradient in gradients) > 0.5
    assert np.linalg.norm(sum(gradients)) < 1e-12


@pytest.mark.parametrize("graph", ["ring", "complete"])
def test_rate_follows_the_root_of_the_condition_number(graph):
    """A condition number 16 times as large makes it four times slower, not sixteen."""
    slow = rates(distances(graph, convexity=0.5 / 16)).mean()
    assert 3.0 < rates(distances(graph)).mean() / slow < 5.5


def test_mixing_is_the_exponential_of_its_matrix():
    matrix = dadao.mixing_matrix(0.25, 4.0)
    one, other, both = dadao.exponentials(matrix, [0.3, 1.1, 1.4])
    np.testing.assert_allclose(one @ other, both, atol=1e-12)
    small = dadao.exponentials(matrix, [1e-6])[0]
    np.testing.assert_allclose((small - np.eye(6)) / 1e-6, matrix, atol=1e-5)
