# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""DADAO for strongly convex and smooth losses (arXiv 2208.00779), by its events, in NumPy.

Worker i minimises f_i, and all together the sum. Each has six vectors x, x~, y, y~, z, z~, which
mix between two events as exp(M dt). Gradients come at the events of a Poisson process of rate 1 of
each worker, and each edge of a graph has a process as well; the rates of edges are equal, and such
that sqrt(chi_1 chi_2) = 1/2. Only an edge's two workers communicate in its events.

The difference of an edge event is the whole one: p_i = (y + z)_i - (y + z)_j for worker i.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

X, X2, Y, Y2, Z, Z2 = range(6)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Losses of all workers."""

    gradient: Callable
    """(worker, x) -> gradient of its loss."""
    optimum: np.ndarray
    """Minimum of the sum."""
    convexity: float
    """Strong convexity mu of each loss."""
    smoothness: float
    """Largest curvature L."""


def quadratics(workers, size, convexity=0.5, smoothness=4.0, seed=0):
    """Losses (x - c_i)' A_i (x - c_i) / 2 with random A_i and c_i."""
    rng = np.random.default_rng(seed)
    matrices, centres = [], rng.standard_normal((workers, size))
    for _ in range(workers):
        basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
        matrices.append(basis @ np.diag(np.linspace(convexity, smoothness, size)) @ basis.T)
    pulled = sum(a @ c for a, c in zip(matrices, centres, strict=True))
    return Problem(
        gradient=lambda worker, x: matrices[worker] @ (x - centres[worker]),
        optimum=np.linalg.solve(sum(matrices), pulled),
        convexity=convexity,
        smoothness=smoothness,
    )


def graph_constants(edges, workers):
    """chi_1 and chi_2 of edges of rate 1."""
    laplacian = np.zeros((workers, workers))
    for one, other in edges:
        edge = np.eye(workers)[one] - np.eye(workers)[other]
        laplacian += np.outer(edge, edge)
    inverse = np.linalg.pinv(laplacian)
    resistances = [inverse[i, i] + inverse[j, j] - 2 * inverse[i, j] for i, j in edges]
    return 1 / np.linalg.eigvalsh(laplacian)[1], max(resistances) / 2


def mixing_matrix(nu, smoothness):
    """M of the six vectors."""
    root = np.sqrt(nu / smoothness)
    eta, alpha, theta = root / 8, root / 4, 1 / (2 * root)
    matrix = np.zeros((6, 6))
    matrix[X, [X, X2]] = -eta, eta
    matrix[X2, [X, X2]] = eta, -eta
    matrix[Y, [Y, Y2]] = -alpha, alpha
    matrix[Y2, [X2, Y, Z]] = -theta * nu, -theta, -theta
    matrix[Z, [Z, Z2]] = -alpha, alpha
    matrix[Z2, [Z, Z2]] = root / 8, -root / 8
    return matrix


def exponentials(matrix, times):
    """exp(M t) of each time, by a series and squarings."""
    small = matrix * (np.asarray(times) / 16)[:, None, None]
    term = total = np.broadcast_to(np.eye(6), small.shape)
    for order in range(1, 16):
        term = term @ small / order
        total = total + term
    for _ in range(4):
        total = total @ total
    return total


def run(problem, edges, workers, time, seed=0, every=10.0):
    """Distances of the workers from the optimum, at multiples of some time.

    Args:
        problem: Losses.
        edges: Pairs of workers that are joined.
        workers: Number of workers.
        time: Time to simulate; a worker has one gradient in a unit of it, on average.
        seed: Seed of the events.
        every: Time between two distances.

    Returns:
        Norms of the differences of all workers' x from the optimum, the first at time 0.
    """
    nu, smoothness = problem.convexity / 2, problem.smoothness
    first, second = graph_constants(edges, workers)
    rate = 2 * np.sqrt(first * second)
    first /= rate
    total = workers + rate * len(edges)
    rng = np.random.default_rng(seed)
    count = rng.poisson(total * time)
    times = np.sort(rng.uniform(0, time, count))
    mixes = exponentials(mixing_matrix(nu, smoothness), np.diff(times, prepend=0.0))
    is_gradient = rng.random(count) < workers / total
    who = rng.integers(0, workers, count)
    which = rng.integers(0, len(edges), count)
    state = np.zeros((6, workers, len(problem.optimum)))
    distances = [np.linalg.norm(state[X] - problem.optimum)]
    for number, now in enumerate(times):
        while now >= every * len(distances):
            distances.append(np.linalg.norm(state[X] - problem.optimum))
        state = np.tensordot(mixes[number], state, 1)
        if is_gradient[number]:
            i = who[number]
            q = problem.gradient(i, state[X, i]) - nu * state[X, i] - state[Y2, i]
            state[X, i] -= q / (4 * smoothness)
            state[X2, i] -= q / (4 * np.sqrt(smoothness * nu))
            state[Y2, i] += (np.sqrt(nu / smoothness) / 4 + 1) * q
        else:
            i, j = edges[which[number]]
            p = state[Y, i] + state[Z, i] - state[Y, j] - state[Z, j]
            for worker, sign in ((i, 1.0), (j, -1.0)):
                state[Z, worker] -= sign * p / 2
                state[Z2, worker] -= sign * 2 * first * np.sqrt(smoothness / nu) * p
    return np.array(distances)
